"""What a pick tells about itself: the token, its numbers, and, when asked, how it came about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from unspool.sampling.arrays import Array
from unspool.sampling.candidates import INF, Candidates
from unspool.sampling.rows import StageState


@dataclass(frozen=True, slots=True)
class Draw:
    """The number drawn, and the interval of [0,1) on which the picked token lay."""

    u: float
    low: float
    high: float


class Candidate(NamedTuple):
    """A token the model thought likely, and what became of it.

    (A tuple because dozens are made at every step, and tuples are made thrice as fast.)
    """

    token: int
    logprob: float  # under the model's own softmax, before any stage
    probability: float  # in the distribution drawn from; 0 when a stage removed it


@dataclass(frozen=True, slots=True)
class StageReport:
    """What one stage did to one row."""

    name: str
    kept: int  # candidates that remain
    removed: int  # candidates that it took away
    kept_mass: float  # the probability, before the stage, of those that it kept
    changed: int  # candidates that remain with another logit
    top: tuple[tuple[int, float], ...]  # the likeliest after it: (token, probability)

    def __repr__(self) -> str:
        return (
            f"<StageReport {self.name}: kept {self.kept}, removed {self.removed} with "
            f"{self.removed_mass:.3g} of the probability, changed {self.changed}>"
        )

    @property
    def removed_mass(self) -> float:
        """The probability, before the stage, of those that it took away."""
        return max(0.0, 1.0 - self.kept_mass)


@dataclass(frozen=True, slots=True)
class Pick:
    """One picked token.

    `logprob`, `rank` (0: likeliest) and `entropy` (nats) are the model's own, before any stage;
    `probability` is the token's in the distribution drawn from. `draw` is None when greedy: then
    nothing was drawn. `state` is to be handed in with the next token of the same text.
    """

    token: int
    logprob: float
    rank: int
    entropy: float
    probability: float
    draw: Draw | None
    state: StageState | None = None
    candidates: tuple[Candidate, ...] = ()
    stages: tuple[StageReport, ...] = ()


Ints = np.ndarray[Any, np.dtype[np.int64]]

TOP_SHOWN = 8
"""How many of the likeliest a stage report shows."""


def report(name: str, before: Candidates, after: Candidates) -> list[StageReport]:
    """A report for each row, from the very candidates that went in and came out."""
    host, now = after.ops.host, after.measure()
    kept = host(after.remaining())
    removed = host(before.remaining()) - kept
    old = _levels(before, after)
    changed = _changed(old, before, after, removed)
    masses = _kept_masses(old, before, after, removed, changed)
    best, weights, _ = after.line(TOP_SHOWN)
    tokens, chances = host(best.ids).tolist(), host(weights / now.total).tolist()
    columns = (kept.tolist(), removed.tolist(), masses, changed.tolist())
    tops = [
        tuple(pair for pair in zip(*row, strict=True) if pair[1] > 0)
        for row in zip(tokens, chances, strict=True)
    ]
    return [StageReport(name, *numbers) for numbers in zip(*columns, tops, strict=True)]


def _levels(before: Candidates, after: Candidates) -> Array:
    """The logits that those who remain had before, column for column."""
    if before.ids is after.ids:
        return before.logits
    if before.ids is None:
        return before.ops.take(before.logits, after.ids)
    width = after.logits.shape[-1]
    if width <= before.logits.shape[-1] and bool((before.ids[:, :width] == after.ids).all()):
        return before.logits[:, :width]
    ops, host = before.ops, before.ops.host
    places = []
    for ids, wanted in zip(host(before.ids), host(after.ids), strict=True):
        order = np.argsort(ids, kind="stable")  # padding repeats an id: the first is the one
        places.append(order[np.searchsorted(ids[order], wanted).clip(max=ids.size - 1)])
    return ops.take(before.logits, ops.like(np.array(places), before.logits))


def _changed(old: Array, before: Candidates, after: Candidates, removed: Ints) -> Ints:
    """How many of each row remain with another logit."""
    differ = old != after.logits
    if old is before.logits:  # every column is still there, and what was removed differs too
        return after.ops.host(after.ops.count(differ)) - removed
    return after.ops.host(after.ops.count(differ & (after.logits > -INF)))


def _kept_masses(
    old: Array, before: Candidates, after: Candidates, removed: Ints, changed: Ints
) -> list[float]:
    """What those who remain had of the probability before; exactly 1 where all remain."""
    if not removed.any():
        return [1.0] * after.rows
    ops, was, now = after.ops, before.measure(), after.measure()
    # Of a row that kept its logits, what remains is summed up already.
    mass = ops.host(now.total * ops.exp(now.peak - was.peak) / was.total)[:, 0]
    if (changed > 0).any():
        weights = ops.exp(ops.double(old) - was.peak)
        sums = ops.where(after.logits > -INF, weights, 0.0).cumsum(-1)[:, -1:] / was.total
        mass = np.where(changed > 0, ops.host(sums)[:, 0], mass)
    shares: list[float] = np.where(removed > 0, mass.clip(max=1.0), 1.0).tolist()
    return shares


def final_probabilities(candidates: Candidates, tokens: Array) -> np.ndarray[Any, Any]:
    """Of tokens [rows, n], those in the candidates' distribution; 0 for those no longer in it."""
    ops, whole = candidates.ops, candidates.measure()
    if candidates.ids is None:
        levels = ops.double(ops.take(candidates.logits, tokens))
        return ops.host(ops.exp(levels - whole.peak) / whole.total)
    weights, ids, wanted = ops.host(whole.weights), ops.host(candidates.ids), ops.host(tokens)
    found = [weights[row] @ (ids[row][:, None] == wanted[row]) for row in range(len(ids))]
    return np.asarray(np.array(found) / ops.host(whole.total))
