"""Unmasking orders: which predictions of a denoising pass are kept.

After a pass each masked position has a prediction. An order decides which are set now; the others
are predicted again in the next pass. It is a function of the predictions and of the minimum number
to set, and returns their indices. A caller may pass a function: `order=lambda g, least: [0]`.

    fixed       a fixed number per pass, most confident first (LLaDA, arXiv 2502.09992)
    threshold   all above a probability threshold (Fast-dLLM, arXiv 2505.22618)
    factor      as many as are confident enough together (the same paper's factor)
    margin      a fixed number per pass, by the margin between the two likeliest tokens (Dream)
    entropy     lowest entropies first, up to a total entropy (EB-Sampler, 2505.24857)
    left        from left to right, while above a probability threshold
    random      a fixed number per pass, at random

Every order sets at least one position, so a canvas is always finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.errors import SettingsError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of one pass for the masked positions, from left to right."""

    places: Sequence[int]
    tokens: Sequence[int]  # sampled for them
    probability: Floats  # of these tokens, before sampling transforms
    margin: Floats  # between the two likeliest tokens
    entropy: Floats  # in nats
    random_numbers: Floats  # a random number in [0, 1) per position, for a random order


Order = Callable[[Predictions, int], Sequence[int]]
"""Maps predictions and a minimum count to the indices of the kept predictions."""


def fixed(guesses: Predictions, least: int) -> list[int]:
    return _highest(guesses.probability, least)


def margin(guesses: Predictions, least: int) -> list[int]:
    return _highest(guesses.margin, least)


def random(guesses: Predictions, least: int) -> list[int]:
    return _highest(guesses.random_numbers, least)


@dataclass(frozen=True, slots=True)
class Threshold:
    """All with at least this probability; the likeliest if these are too few."""

    least: float

    def __call__(self, guesses: Predictions, least: int) -> list[int]:
        sure = int(np.count_nonzero(guesses.probability >= self.least))
        return _highest(guesses.probability, max(sure, least))


@dataclass(frozen=True, slots=True)
class Factor:
    """The n likeliest, for the largest n whose last probability is >= 1 - factor / (n + 1)."""

    factor: float

    def __call__(self, guesses: Predictions, least: int) -> list[int]:
        order = _highest(guesses.probability, len(guesses.places))
        sorted_down = guesses.probability[order]
        needed = 1 - self.factor / (np.arange(len(order)) + 2)
        return order[: max(least, _count_leading(sorted_down >= needed))]


@dataclass(frozen=True, slots=True)
class EntropyBound:
    """Lowest entropies first, while the entropies of all but the last sum to at most `bound`: this
    bounds the error of setting them independently."""

    bound: float

    def __call__(self, guesses: Predictions, least: int) -> list[int]:
        order = _highest(-guesses.entropy, len(guesses.places))
        entropies = guesses.entropy[order]
        others = np.cumsum(entropies) - entropies
        return order[: max(least, _count_leading(others <= self.bound))]


@dataclass(frozen=True, slots=True)
class LeftRun:
    """From the left, up to the first below this probability."""

    least: float

    def __call__(self, guesses: Predictions, least: int) -> list[int]:
        run = _count_leading(guesses.probability >= self.least)
        return list(range(min(len(guesses.places), max(least, run))))


def _highest(score: Floats, count: int) -> list[int]:
    """Indices of the highest scores, highest first; ties from the left."""
    indices: list[int] = np.argsort(-score, kind="stable")[:count].tolist()
    return indices


def _count_leading(holds: npt.NDArray[np.bool_]) -> int:
    """Number of True values before the first False."""
    return len(holds) if bool(holds.all()) else int(np.argmin(holds))


ORDERS = ("threshold", "factor", "entropy", "left", "fixed", "margin", "random")


def make_order(
    order: Any, *, threshold: float = 0.9, factor: float = 1.0, entropy_bound: float = 0.1
) -> Order:
    """Look up an order by name; a function is an order already."""
    if callable(order):
        return order  # type: ignore[no-any-return]
    orders: dict[str, Order] = {
        "threshold": Threshold(threshold),
        "factor": Factor(factor),
        "entropy": EntropyBound(entropy_bound),
        "left": LeftRun(threshold),
        "fixed": fixed,
        "margin": margin,
        "random": random,
    }
    if order not in orders:
        raise SettingsError(
            f"order must be one of {', '.join(ORDERS)}, or a function, got {order!r}"
        )
    return orders[order]


def spread(count: int, passes: int) -> list[int]:
    """Minimum positions per pass: `count` spread evenly over `passes`, earlier passes first."""
    base, remainder = divmod(count, passes)
    return [base + (number < remainder) for number in range(passes)]
