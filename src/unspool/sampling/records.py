"""What a pick tells about itself: the token, its numbers, and, when asked, how it came about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.sampling.candidates import INF, Candidates
from unspool.sampling.rows import StageState


@dataclass(frozen=True, slots=True)
class Draw:
    """The number drawn, and the interval of [0,1) on which the picked token lay."""

    u: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token the model thought likely, and what became of it."""

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

    @property
    def removed_mass(self) -> float:
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


TOP_SHOWN = 8
"""How many of the likeliest a stage report shows."""

_Row = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def report(name: str, before: Candidates, after: Candidates) -> list[StageReport]:
    """A report for each row, from the very candidates that went in and came out."""
    best = after.lead(TOP_SHOWN)
    now, host = after.measure(), after.ops.host
    chances = host(after.ops.exp(best.logits - now.peak) / now.total)
    tokens = host(best.ids)
    tops = []
    for r in range(after.rows):
        pairs = zip(tokens[r].tolist(), chances[r].tolist(), strict=True)
        tops.append(tuple(pair for pair in pairs if pair[1] > 0))
    return _reports(name, before, [_row(after, r) for r in range(after.rows)], tops)


def greedy_report(before: Candidates, tokens: np.ndarray[Any, Any]) -> list[StageReport]:
    """Taking the likeliest, told as a stage that keeps one."""
    kept = [(np.array([t]), _levels(before, r, np.array([t]))) for r, t in enumerate(tokens)]
    return _reports("greedy", before, kept, [((int(token), 1.0),) for token in tokens])


def _reports(
    name: str, before: Candidates, after: list[_Row], tops: list[tuple[tuple[int, float], ...]]
) -> list[StageReport]:
    was, host = before.measure(), before.ops.host
    peaks, totals = host(was.peak)[:, 0], host(was.total)[:, 0]
    counts = host(before.remaining())
    reports = []
    for r, (ids, logits) in enumerate(after):
        old = _levels(before, r, ids)
        mass = 1.0  # exactly, when nothing was removed
        if ids.size < counts[r]:
            mass = float(np.exp(old.astype(np.float64) - peaks[r]).sum() / totals[r])
        reports.append(
            StageReport(
                name=name,
                kept=int(ids.size),
                removed=int(counts[r] - ids.size),
                kept_mass=min(1.0, mass),
                changed=int(np.count_nonzero(old != logits)),
                top=tops[r],
            )
        )
    return reports


def _levels(candidates: Candidates, row: int, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The logits of tokens that are among a row's candidates."""
    logits = candidates.ops.host(candidates.logits[row])
    if candidates.ids is None:
        in_place = tokens.size == logits.size and bool((tokens[1:] > tokens[:-1]).all())
        return logits if in_place else logits[tokens]  # a look-up for every token is slow
    ids, kept = _row(candidates, row)
    order = np.argsort(ids)
    return np.asarray(kept[order[np.searchsorted(ids[order], tokens)]])


def final_probabilities(
    candidates: Candidates, row: int, tokens: np.ndarray[Any, Any]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The probabilities of given tokens in a row's distribution; 0 for those no longer in it."""
    ids, logits = _row(candidates, row)
    measure = candidates.measure()
    host = candidates.ops.host
    peak, total = float(host(measure.peak)[row, 0]), float(host(measure.total)[row, 0])
    if candidates.ids is None:
        spot = np.searchsorted(ids, tokens).clip(max=ids.size - 1)
    else:
        order = np.argsort(ids)
        spot = order[np.searchsorted(ids[order], tokens).clip(max=ids.size - 1)]
    chances = np.exp(logits[spot].astype(np.float64) - peak) / total
    return np.where(ids[spot] == tokens, chances, 0.0)


def _row(candidates: Candidates, row: int) -> _Row:
    """Ids and logits of a row's remaining candidates."""
    host = candidates.ops.host
    logits = host(candidates.logits[row])
    alive = logits > -INF
    if candidates.ids is None and alive.all():
        return np.arange(logits.size), logits
    kept = np.flatnonzero(alive)
    ids = kept if candidates.ids is None else host(candidates.ids[row])[kept]
    return ids, logits[kept]
