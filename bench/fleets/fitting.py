"""From measured steps to a table of costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import nnls

from fleets.costs import Table

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Measured:
    """One step as it was; the numbers are those of `StepCosts.step`."""

    rows: int
    context: int
    prefill: int
    pairs: int
    seconds: float


def fit(steps: Sequence[Measured]) -> tuple[dict[str, Any], float]:
    """The terms that explain measured steps best, none of them below zero; and the median of the
    errors that are left, as shares.

    Errors count by their share of a step's time, so that quick steps, which are most of them, are
    met as well as slow ones. Each step is a weighted sum of the unknowns (the rises of the tables
    between their knots, and the other terms), and the best ones are found by least squares.
    """
    rows, tokens = _knots([s.rows for s in steps]), _knots([s.prefill for s in steps])
    weights = np.array(
        [(*_ramps(s.rows, rows), *_ramps(s.prefill, tokens), s.context, s.pairs) for s in steps]
    )
    seconds = np.array([step.seconds for step in steps])
    scale = np.maximum(weights.max(axis=0), 1e-30)
    found, _ = nnls(weights / scale / seconds[:, None], np.ones(len(steps)))
    found = found / scale
    error = float(np.median(np.abs(weights @ found / seconds - 1)))
    terms = {
        "decode": Table(rows, _sums(found[: len(rows)])),
        "prefill": Table(tokens, _sums(found[len(rows) : -2])),
        "context_s": float(found[-2]),
        "pair_s": float(found[-1]),
    }
    return terms, error


def _knots(seen: Sequence[int]) -> tuple[int, ...]:
    """Where something was measured: a table says nothing of its own between two of these."""
    near = [k for k in KNOTS if any(0.75 * k <= number <= 1.5 * k for number in seen)]
    return tuple(near) or KNOTS[:1]


def _ramps(number: int, knots: Sequence[int]) -> list[float]:
    """A table is the seconds at its first knot, and between two knots a rise that is never below
    zero: how much of each of these a number has."""
    if not number:
        return [0.0] * len(knots)
    rises = [(number - before) / (knot - before) for before, knot in pairwise(knots)]
    inner = [min(max(rise, 0.0), 1.0) for rise in rises[:-1]]
    return [1.0, *inner, *(max(rise, 0.0) for rise in rises[-1:])]


def _sums(rises: Any) -> tuple[float, ...]:
    return tuple(float(seconds) for seconds in np.cumsum(rises))
