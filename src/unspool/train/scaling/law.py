"""The law of scaling, L = E + A/N^a + B/D^b: fitted to runs, with intervals, and used to predict.

E is what no model can know of the text, the second term what a model of N parameters cannot hold,
the third what D tokens do not tell. As in Chinchilla (Hoffmann et al. 2022), the fit minimizes
Huber's loss of the difference in log loss, which a single odd run cannot pull far, from many
starts; intervals come from fitting again to runs drawn with replacement.

    law = fit(runs)
    law.loss(parameters=1e8, tokens=2e9)
    law.best_at(flops=1e17)                   # how large a model, on how many tokens

All starts and all redraws are one batch of small least-squares problems (Levenberg-Marquardt with
Huber's weights), which takes a second or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.errors import SettingsError

Floats = npt.NDArray[np.float64]

HUBER = 1e-3  # beyond this difference in log loss, a run counts linearly
FEWEST = 6  # runs: five numbers are fitted
_STARTS = tuple(
    product((0.0, 5.0, 10.0, 15.0), (0.1, 0.35, 0.7), (0.0, 5.0, 10.0, 15.0), (0.1, 0.35, 0.7),
            (-1.0, 0.0, 0.7))
)  # fmt: skip
_LOW = np.array([-10.0, 0.0, -10.0, 0.0, -5.0])
_HIGH = np.array([60.0, 3.0, 60.0, 3.0, 3.0])


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: its size, its tokens, and the loss on held-out text (nats a token)."""

    parameters: float
    tokens: float
    loss: float
    flops: float = 0.0  # of the whole training; 6ND where nobody counted

    @property
    def compute(self) -> float:
        return self.flops or 6 * self.parameters * self.tokens


@dataclass(frozen=True, slots=True)
class Law:
    """The five numbers; `redraws` are those of fits to runs drawn with replacement."""

    e: float
    a: float
    alpha: float
    b: float
    beta: float
    error: float = 0.0  # mean difference in log loss on the runs of the fit
    redraws: tuple[tuple[float, ...], ...] = field(default=(), repr=False)

    def loss(self, parameters: float, tokens: float) -> float:
        return float(_losses(self._row, parameters, tokens))

    def interval(
        self, parameters: float, tokens: float, share: float = 0.9
    ) -> tuple[float, float] | None:
        """Where the loss lies in `share` of the redraws; None without any."""
        if not self.redraws:
            return None
        return _middle(_losses(np.array(self.redraws), parameters, tokens), share)

    def intervals(self, share: float = 0.9) -> dict[str, tuple[float, float]]:
        """Where each number of the law lies in `share` of the redraws."""
        if not self.redraws:
            return {}
        rows = np.array(self.redraws)
        rows = np.stack(
            [np.exp(rows[:, 4]), np.exp(rows[:, 0]), rows[:, 1], np.exp(rows[:, 2]), rows[:, 3]], 1
        )
        names = ("e", "a", "alpha", "b", "beta")
        return {name: _middle(rows[:, n], share) for n, name in enumerate(names)}

    def best_at(self, flops: float) -> tuple[float, float]:
        """Parameters and tokens that give the lowest loss for so much compute, C = 6ND."""
        if min(self.alpha, self.beta, self.a, self.b) <= 0:
            raise SettingsError(
                "the fitted law has no best size, as a term of it does not fall; add runs of more "
                "sizes or budgets"
            )
        both = self.alpha + self.beta
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / both)
        parameters = ratio * (flops / 6) ** (self.beta / both)
        return parameters, flops / 6 / parameters

    @property
    def _row(self) -> Floats:
        return np.array([np.log(self.a), self.alpha, np.log(self.b), self.beta, np.log(self.e)])

    def to_dict(self) -> dict[str, Any]:
        names = ("e", "a", "alpha", "b", "beta", "error")
        return {
            **{name: getattr(self, name) for name in names},
            "intervals_90": {name: list(ends) for name, ends in self.intervals().items()},
        }


def fit(runs: Sequence[Measured], *, redraws: int = 200, seed: int = 0) -> Law:
    """The law that these runs follow most closely."""
    if len(runs) < FEWEST:
        raise SettingsError(
            f"{len(runs)} runs are too few for a law of five numbers; at least {FEWEST} are needed"
        )
    if len({run.parameters for run in runs}) < 2 or len({run.tokens for run in runs}) < 2:
        raise SettingsError("the runs need at least two sizes and two amounts of data")
    x = np.log([run.parameters for run in runs])
    y = np.log([run.tokens for run in runs])
    z = np.log([run.loss for run in runs])
    whole = np.ones((len(_STARTS), len(runs)))
    found, cost = _minimize(np.array(_STARTS), x, y, z, whole)
    order = np.argsort(cost)
    best = found[order[0]]
    rows = _redrawn(found[order[:8]], x, y, z, redraws, seed) if redraws else np.empty((0, 5))
    residual = np.abs(_log_losses(best[None], x, y)[0][0] - z)
    a, alpha, b, beta, e = best
    return Law(
        float(np.exp(e)), float(np.exp(a)), float(alpha), float(np.exp(b)), float(beta),
        float(residual.mean()), tuple(tuple(map(float, row)) for row in rows),
    )  # fmt: skip


def _redrawn(starts: Floats, x: Floats, y: Floats, z: Floats, count: int, seed: int) -> Floats:
    """The best fit to each of `count` draws of the runs, with replacement."""
    drawn = np.random.default_rng(seed).integers(0, len(x), (count, len(x)))
    weights = np.stack([np.bincount(row, minlength=len(x)) for row in drawn]).astype(float)
    # A draw of one size only tells nothing of sizes: such draws are left out.
    varied = [
        len(set(x[w > 0])) > 1 and len(set(y[w > 0])) > 1 and (w > 0).sum() >= 5 for w in weights
    ]
    weights = weights[varied]
    every = np.tile(starts, (len(weights), 1))
    found, cost = _minimize(every, x, y, z, np.repeat(weights, len(starts), 0))
    best = cost.reshape(len(weights), -1).argmin(1)
    rows: Floats = found.reshape(len(weights), -1, 5)[np.arange(len(weights)), best]
    return rows


def _minimize(
    starts: Floats, x: Floats, y: Floats, z: Floats, weights: Floats, steps: int = 400
) -> tuple[Floats, Floats]:
    """The numbers behind each start at which the weighted Huber loss is lowest, and that loss."""
    at, damping = starts.copy(), np.full(len(starts), 1e-2)
    guess, slopes = _log_losses(at, x, y)
    cost = _huber(guess - z, weights)
    for _ in range(steps):
        off = guess - z
        pull = weights * np.minimum(1.0, HUBER / np.maximum(np.abs(off), 1e-300))
        square = np.einsum("sr,sri,srj->sij", pull, slopes, slopes)
        gradient = np.einsum("sr,sri,sr->si", pull, slopes, off)
        scale = np.einsum("sii->si", square) + 1e-9
        step = np.linalg.solve(
            square + damping[:, None, None] * scale[:, :, None] * np.eye(5), gradient[..., None]
        )[..., 0]
        tried = np.clip(at - step, _LOW, _HIGH)
        new_guess, new_slopes = _log_losses(tried, x, y)
        new_cost = _huber(new_guess - z, weights)
        better = new_cost < cost
        change = np.abs(tried - at).max()
        at[better], guess[better], slopes[better] = (
            tried[better], new_guess[better], new_slopes[better],
        )  # fmt: skip
        cost = np.where(better, new_cost, cost)
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-12, 1e8)
        if change < 1e-12:
            break
    return at, cost


def _log_losses(rows: Floats, x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """log L of each run by each row of numbers [rows, runs], and its slopes [rows, runs, 5]."""
    a, alpha, b, beta, e = (rows[:, n, None] for n in range(5))
    terms = np.stack([a - alpha * x, b - beta * y, np.broadcast_to(e, (len(rows), len(x)))], -1)
    peak = terms.max(-1, keepdims=True)
    parts = np.exp(terms - peak)
    total = parts.sum(-1, keepdims=True)
    share = parts / total
    slopes = np.stack(
        [share[..., 0], -x * share[..., 0], share[..., 1], -y * share[..., 1], share[..., 2]], -1
    )
    return (peak + np.log(total))[..., 0], slopes


def _huber(off: Floats, weights: Floats) -> Floats:
    far = np.abs(off)
    loss = np.where(far < HUBER, off**2 / 2, HUBER * (far - HUBER / 2))
    total: Floats = (weights * loss).sum(-1)
    return total


def _losses(rows: Floats, parameters: float, tokens: float) -> Floats:
    one = np.atleast_2d(rows)
    found = np.exp(_log_losses(one, np.log([parameters]), np.log([tokens]))[0][:, 0])
    return found if rows.ndim == 2 else found[0]


def _middle(values: Floats, share: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)
