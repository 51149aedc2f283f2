"""Results of the chain: the picked token, its probabilities and, if requested, stage reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from unspool.sampling.arrays import Array
from unspool.sampling.candidates import INF, Candidates
from unspool.sampling.rows import StageState


@dataclass(frozen=True, slots=True)
class Draw:
    """The random number, and the interval of [0,1) of the picked token."""

    u: float
    low: float
    high: float


class Candidate(NamedTuple):
    """A likely token, before and after the stages.

    (A tuple because dozens are made per step, and a dataclass takes three times as long.)
    """

    token: int
    logprob: float  # of the model, before any stage
    probability: float  # after all stages; 0 if removed


@dataclass(frozen=True, slots=True)
class StageReport:
    """What one stage did to one row."""

    name: str
    kept: int  # candidates that remain
    removed: int  # candidates that it removed
    kept_mass: float  # probability mass, before the stage, of the kept candidates
    changed: int  # remaining candidates with another logit
    top: tuple[tuple[int, float], ...]  # most likely tokens after it: (token, probability)

    def __repr__(self) -> str:
        return (
            f"<StageReport {self.name}: kept {self.kept}, removed {self.removed} with "
            f"{self.removed_mass:.3g} of the probability, changed {self.changed}>"
        )

    @property
    def removed_mass(self) -> float:
        """Probability mass, before the stage, of the removed candidates."""
        return max(0.0, 1.0 - self.kept_mass)


@dataclass(frozen=True, slots=True)
class Pick:
    """One picked token.

    `logprob`, `rank` (0: most likely) and `entropy` (nats) are the model's, before any stage;
    `probability` is the token's after all stages. `draw` is None for greedy decoding. `state` must
    be passed with the next token of the same sequence.
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

REPORT_TOP = 8
"""Number of most likely tokens in a stage report."""


def report(name: str, before: Candidates, after: Candidates) -> list[StageReport]:
    """Report what a stage did to each row."""
    host, stats_after = after.ops.to_numpy, after.softmax_stats()
    num_kept = host(after.remaining())
    removed = host(before.remaining()) - num_kept
    logits_before = _logits_before(before, after)
    changed = _changed(logits_before, before, after, removed)
    masses = _kept_masses(logits_before, before, after, removed, changed)
    most_likely, weights, _ = after.cumulative(REPORT_TOP)
    tokens, probabilities = (
        host(most_likely.ids).tolist(),
        host(weights / stats_after.total).tolist(),
    )
    columns = (num_kept.tolist(), removed.tolist(), masses, changed.tolist())
    tops = [
        tuple(pair for pair in zip(*row, strict=True) if pair[1] > 0)
        for row in zip(tokens, probabilities, strict=True)
    ]
    return [StageReport(name, *numbers) for numbers in zip(*columns, tops, strict=True)]


def _logits_before(before: Candidates, after: Candidates) -> Array:
    """Logits before the stage of the candidates after it, column by column."""
    if before.ids is after.ids:
        return before.logits
    if before.ids is None:
        return before.ops.take_columns(before.logits, after.ids)
    width = after.logits.shape[-1]
    if width <= before.logits.shape[-1] and bool((before.ids[:, :width] == after.ids).all()):
        return before.logits[:, :width]
    ops, host = before.ops, before.ops.to_numpy
    columns_of = []
    for ids, targets in zip(host(before.ids), host(after.ids), strict=True):
        order = np.argsort(ids, kind="stable")  # padding repeats an id: use the first
        columns_of.append(order[np.searchsorted(ids[order], targets).clip(max=ids.size - 1)])
    return ops.take_columns(before.logits, ops.to_array_like(np.array(columns_of), before.logits))


def _changed(logits_before: Array, before: Candidates, after: Candidates, removed: Ints) -> Ints:
    """Number of remaining candidates of each row with another logit."""
    differ = logits_before != after.logits
    if logits_before is before.logits:  # same columns: removed candidates differ too
        return after.ops.to_numpy(after.ops.count(differ)) - removed
    return after.ops.to_numpy(after.ops.count(differ & (after.logits > -INF)))


def _kept_masses(
    logits_before: Array, before: Candidates, after: Candidates, removed: Ints, changed: Ints
) -> list[float]:
    """Probability mass before the stage of the remaining candidates; exactly 1 if all remain."""
    if not removed.any():
        return [1.0] * after.rows
    ops, stats_before, stats_after = after.ops, before.softmax_stats(), after.softmax_stats()
    # If a row's logits did not change, the sum over the remaining is known already.
    mass = ops.to_numpy(
        stats_after.total * ops.exp(stats_after.peak - stats_before.peak) / stats_before.total
    )[:, 0]
    if (changed > 0).any():
        weights = ops.exp(ops.to_float64(logits_before) - stats_before.peak)
        sums = ops.where(after.logits > -INF, weights, 0.0).cumsum(-1)[:, -1:] / stats_before.total
        mass = np.where(changed > 0, ops.to_numpy(sums)[:, 0], mass)
    masses: list[float] = np.where(removed > 0, mass.clip(max=1.0), 1.0).tolist()
    return masses


def final_probabilities(candidates: Candidates, tokens: Array) -> np.ndarray[Any, Any]:
    """Probabilities of tokens [rows, n] among the candidates; 0 for removed ones."""
    ops, stats = candidates.ops, candidates.softmax_stats()
    if candidates.ids is None:
        logits = ops.to_float64(ops.take_columns(candidates.logits, tokens))
        return ops.to_numpy(ops.exp(logits - stats.peak) / stats.total)
    weights, ids, targets = (
        ops.to_numpy(stats.weights),
        ops.to_numpy(candidates.ids),
        ops.to_numpy(tokens),
    )
    masses = [weights[row] @ (ids[row][:, None] == targets[row]) for row in range(len(ids))]
    return np.asarray(np.array(masses) / ops.to_numpy(stats.total))
