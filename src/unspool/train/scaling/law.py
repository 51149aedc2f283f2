"""Scaling law L = E + A/N^a + B/D^b: fit to runs, confidence intervals, predictions.

E is the entropy of the text, the second term the limit of N parameters, the third that of D tokens.
As in Chinchilla (Hoffmann et al. 2022), the fit minimizes the Huber loss of the difference in log
loss, which is robust to outliers, from many starting points; intervals are bootstrapped.

    law = fit(runs)
    law.loss(parameters=1e8, tokens=2e9)
    law.best_at(flops=1e17)                   # optimal parameters and tokens

All starting points and all bootstrap samples are one batch of small least-squares problems
(Levenberg-Marquardt with Huber weights), which takes a second or two.
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

HUBER_DELTA = 1e-3  # of the difference in log loss: quadratic below, linear above
MIN_RUNS = 6  # five parameters are fitted
_STARTS = tuple(
    product((0.0, 5.0, 10.0, 15.0), (0.1, 0.35, 0.7), (0.0, 5.0, 10.0, 15.0), (0.1, 0.35, 0.7),
            (-1.0, 0.0, 0.7))
)  # fmt: skip
_LOW = np.array([-10.0, 0.0, -10.0, 0.0, -5.0])
_HIGH = np.array([60.0, 3.0, 60.0, 3.0, 3.0])


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run: parameters, tokens, and held-out loss (nats per token)."""

    parameters: float
    tokens: float
    loss: float
    flops: float = 0.0  # of the whole training; 0: use 6ND

    @property
    def compute(self) -> float:
        return self.flops or 6 * self.parameters * self.tokens


@dataclass(frozen=True, slots=True)
class Law:
    """Parameters of the law; `redraws` are those of the bootstrap fits."""

    e: float
    a: float
    alpha: float
    b: float
    beta: float
    error: float = 0.0  # mean absolute difference in log loss on the fitted runs
    redraws: tuple[tuple[float, ...], ...] = field(default=(), repr=False)

    def loss(self, parameters: float, tokens: float) -> float:
        return float(_losses(self._row, parameters, tokens))

    def interval(
        self, parameters: float, tokens: float, share: float = 0.9
    ) -> tuple[float, float] | None:
        """Confidence interval of the loss; None without bootstrap fits."""
        if not self.redraws:
            return None
        return _central_interval(_losses(np.array(self.redraws), parameters, tokens), share)

    def intervals(self, share: float = 0.9) -> dict[str, tuple[float, float]]:
        """Confidence interval of each parameter of the law."""
        if not self.redraws:
            return {}
        rows = np.array(self.redraws)
        rows = np.stack(
            [np.exp(rows[:, 4]), np.exp(rows[:, 0]), rows[:, 1], np.exp(rows[:, 2]), rows[:, 3]], 1
        )
        names = ("e", "a", "alpha", "b", "beta")
        return {name: _central_interval(rows[:, n], share) for n, name in enumerate(names)}

    def best_at(self, flops: float) -> tuple[float, float]:
        """Compute-optimal parameters and tokens, with C = 6ND."""
        if min(self.alpha, self.beta, self.a, self.b) <= 0:
            raise SettingsError(
                "the fitted law has no optimal size, because one of its terms does not decrease; "
                "add runs of more sizes or budgets"
            )
        exponent_sum = self.alpha + self.beta
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / exponent_sum)
        parameters = ratio * (flops / 6) ** (self.beta / exponent_sum)
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


def fit(runs: Sequence[RunResult], *, redraws: int = 200, seed: int = 0) -> Law:
    """Fit the law to runs, with `redraws` bootstrap samples for the intervals."""
    if len(runs) < MIN_RUNS:
        raise SettingsError(f"a scaling law needs at least {MIN_RUNS} runs, got {len(runs)}")
    if len({run.parameters for run in runs}) < 2 or len({run.tokens for run in runs}) < 2:
        raise SettingsError("the runs need at least two sizes and two amounts of data")
    x = np.log([run.parameters for run in runs])
    y = np.log([run.tokens for run in runs])
    z = np.log([run.loss for run in runs])
    weights = np.ones((len(_STARTS), len(runs)))
    fits, cost = _minimize(np.array(_STARTS), x, y, z, weights)
    order = np.argsort(cost)
    best = fits[order[0]]
    rows = _bootstrap(fits[order[:8]], x, y, z, redraws, seed) if redraws else np.empty((0, 5))
    residual = np.abs(_log_losses(best[None], x, y)[0][0] - z)
    a, alpha, b, beta, e = best
    return Law(
        float(np.exp(e)), float(np.exp(a)), float(alpha), float(np.exp(b)), float(beta),
        float(residual.mean()), tuple(tuple(map(float, row)) for row in rows),
    )  # fmt: skip


def _bootstrap(starts: Floats, x: Floats, y: Floats, z: Floats, count: int, seed: int) -> Floats:
    """The best fit to each of `count` samples of the runs, drawn with replacement."""
    samples = np.random.default_rng(seed).integers(0, len(x), (count, len(x)))
    weights = np.stack([np.bincount(row, minlength=len(x)) for row in samples]).astype(float)
    # A sample with a single size or budget cannot be fitted.
    varied = [
        len(set(x[w > 0])) > 1 and len(set(y[w > 0])) > 1 and (w > 0).sum() >= 5 for w in weights
    ]
    weights = weights[varied]
    all_starts = np.tile(starts, (len(weights), 1))
    fits, cost = _minimize(all_starts, x, y, z, np.repeat(weights, len(starts), 0))
    best = cost.reshape(len(weights), -1).argmin(1)
    rows: Floats = fits.reshape(len(weights), -1, 5)[np.arange(len(weights)), best]
    return rows


def _minimize(
    starts: Floats, x: Floats, y: Floats, z: Floats, weights: Floats, steps: int = 400
) -> tuple[Floats, Floats]:
    """Minimize the weighted Huber loss from each start; returns the parameters and the loss."""
    at, damping = starts.copy(), np.full(len(starts), 1e-2)
    predicted, slopes = _log_losses(at, x, y)
    cost = _huber(predicted - z, weights)
    for _ in range(steps):
        residual = predicted - z
        factor = weights * np.minimum(1.0, HUBER_DELTA / np.maximum(np.abs(residual), 1e-300))
        square = np.einsum("sr,sri,srj->sij", factor, slopes, slopes)
        gradient = np.einsum("sr,sri,sr->si", factor, slopes, residual)
        scale = np.einsum("sii->si", square) + 1e-9
        step = np.linalg.solve(
            square + damping[:, None, None] * scale[:, :, None] * np.eye(5), gradient[..., None]
        )[..., 0]
        trial = np.clip(at - step, _LOW, _HIGH)
        new_predicted, new_slopes = _log_losses(trial, x, y)
        new_cost = _huber(new_predicted - z, weights)
        better = new_cost < cost
        change = np.abs(trial - at).max()
        at[better], predicted[better], slopes[better] = (
            trial[better], new_predicted[better], new_slopes[better],
        )  # fmt: skip
        cost = np.where(better, new_cost, cost)
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-12, 1e8)
        if change < 1e-12:
            break
    return at, cost


def _log_losses(rows: Floats, x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """log L of each run for each row of parameters [rows, runs], and its slopes [rows, runs, 5]."""
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


def _huber(residual: Floats, weights: Floats) -> Floats:
    size = np.abs(residual)
    linear = HUBER_DELTA * (size - HUBER_DELTA / 2)
    loss = np.where(size < HUBER_DELTA, residual**2 / 2, linear)
    total: Floats = (weights * loss).sum(-1)
    return total


def _losses(rows: Floats, parameters: float, tokens: float) -> Floats:
    log_losses = _log_losses(np.atleast_2d(rows), np.log([parameters]), np.log([tokens]))[0]
    losses = np.exp(log_losses[:, 0])
    return losses if rows.ndim == 2 else losses[0]


def _central_interval(values: Floats, share: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)
