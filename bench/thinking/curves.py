"""Accuracy against tokens, with intervals, from what was written.

A point is the mean over problems. Samples are cut into blocks of n, each of which is one run of the
policy; a problem's value is the mean over its blocks. The 95 % intervals are bootstraps over
problems, and so are those of the gain over one sample of the same problem.

Tokens are those written and judged for a problem. The prompt, which every policy reads once, is
told beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from thinking.records import CHOICES, Choice, Drawn, Sample, Searched
from unspool.costs.part import bootstrap_means

ONE, GREEDY = "one sample", "greedy"


@dataclass(frozen=True)
class Point:
    """What a policy comes to with the tokens of n samples."""

    n: int
    tokens: float  # written and judged for a problem, on average
    accuracy: float
    low: float
    high: float
    gain: float  # over one sample
    gain_low: float
    gain_high: float
    problems: int
    runs: int  # of the policy for each problem
    errors: int = 0  # searches that came to nothing


def curves(drawn: Sequence[Drawn], searched: Sequence[Searched]) -> dict[str, list[dict[str, Any]]]:
    """The points of every policy, by its name."""
    single = {one.id: fmean(sample.right for sample in one.samples) for one in drawn}
    size = min(len(one.samples) for one in drawn)
    certain = min(sum(s.certainty is not None for s in one.samples) for one in drawn)
    voting = any(sample.answer is not None for one in drawn for sample in one.samples)
    greedy = {one.id: (float(one.greedy.right), float(one.greedy.tokens)) for one in drawn}
    found = {
        ONE: [_of_blocks(drawn, 1, size, _first, False, single)],
        GREEDY: [_point(1, greedy, single, 1)],
    }
    for name, (choice, judged, votes) in CHOICES.items():
        if votes and not voting:
            continue
        most = certain if judged else size
        sizes = [2**power for power in range(1, 12) if 2**power <= most]
        found[name] = [_of_blocks(drawn, n, most, choice, judged, single) for n in sizes]
    for name in dict.fromkeys(one.policy for one in searched):
        own = [one for one in searched if one.policy == name]
        found[name] = [
            _of_searches([one for one in own if one.n == n], n, single)
            for n in sorted({one.n for one in own})
        ]
    return {name: [asdict(point) for point in points] for name, points in found.items() if points}


def _first(samples: Sequence[Sample]) -> Sample:
    return samples[0]


def _of_blocks(
    drawn: Sequence[Drawn],
    n: int,
    most: int,
    choice: Choice,
    judged: bool,
    single: dict[str, float],
) -> Point:
    """A policy over blocks of n samples, of which the first `most` are used."""
    values = {}
    for one in drawn:
        blocks = [one.samples[begin : begin + n] for begin in range(0, most - n + 1, n)]
        chosen = [choice(block) for block in blocks]
        written = sum(sample.tokens for block in blocks for sample in block) / len(blocks)
        right = fmean(bool(sample and sample.right) for sample in chosen)
        values[one.id] = (right, written * (2 if judged else 1))
    return _point(n, values, single, most // n)


def _of_searches(searched: Sequence[Searched], n: int, single: dict[str, float]) -> Point:
    values = {one.id: (float(one.right), float(one.spent)) for one in searched}
    return _point(n, values, single, 1, sum(bool(one.error) for one in searched))


def _point(
    n: int,
    values: dict[str, tuple[float, float]],
    single: dict[str, float],
    runs: int,
    errors: int = 0,
) -> Point:
    right = np.array([value[0] for value in values.values()])
    gains = right - np.array([single[name] for name in values])
    (low, gain_low), (high, gain_high) = bootstrap_means(np.stack([right, gains], axis=1))
    return Point(
        n, fmean(value[1] for value in values.values()), _mean(right), low, high,
        _mean(gains), gain_low, gain_high, len(values), runs, errors,
    )  # fmt: skip


def _mean(rows: Any) -> float:
    return float(np.mean(rows))


# -- when voting loses -------------------------------------------------------------------------

EDGES = (0.0, 1e-9, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0 + 1e-9)


def voting(drawn: Sequence[Drawn], sizes: Sequence[int] = (4, 16)) -> dict[str, Any]:
    """What a vote gains over one sample, by how often a sample of that problem is right.

    How often is asked of one half of the samples, and the vote is held among the other half, so
    that luck in one is not luck in the other.
    """
    vote = CHOICES["vote"][0]
    rows = []
    for one in drawn:
        half = len(one.samples) // 2
        asked, voters = one.samples[half:], one.samples[:half]
        if not asked or half < max(sizes):
            continue
        single = fmean(sample.right for sample in voters)
        gains = []
        for n in sizes:
            blocks = [voters[begin : begin + n] for begin in range(0, half - n + 1, n)]
            chosen = [vote(block) for block in blocks]
            gains.append(fmean(bool(sample and sample.right) for sample in chosen) - single)
        rows.append((fmean(sample.right for sample in asked), *gains))
    table = np.array(rows).reshape(len(rows), 1 + len(sizes))
    bins = []
    for low, high in pairwise(EDGES):
        inside = table[(table[:, 0] >= low) & (table[:, 0] < high)]
        if len(inside) < 5:
            continue
        lows, highs = bootstrap_means(inside[:, 1:])
        gains = [
            {
                "n": n,
                "gain": _mean(inside[:, 1 + k]),
                "low": float(lows[k]),
                "high": float(highs[k]),
            }
            for k, n in enumerate(sizes)
        ]
        bins.append({"right": _mean(inside[:, 0]), "problems": len(inside), "gains": gains})
    return {"bins": bins, "problems": len(rows)}
