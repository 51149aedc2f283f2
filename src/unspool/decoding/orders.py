"""In which order the places of a canvas are filled: which of a pass's guesses are kept.

After a pass each masked place has a guess. An order says which of them are set now; the others wait
for the next pass, which sees those. It is a function of the guesses and of how many must be set at
least, and gives their numbers. A new one is a function of one's own: `order=lambda g, least: [0]`.

    fixed       so many a pass, surest first (LLaDA, arXiv 2502.09992)
    threshold   all that are likelier than a threshold (Fast-dLLM, arXiv 2505.22618)
    factor      as many as are sure enough together (the same paper's factor)
    margin      so many a pass, by the lead of the likeliest token over the second (Dream)
    entropy     the surest as long as their entropies sum to little (EB-Sampler, 2505.24857)
    left        from left to right, as long as they are likelier than a threshold
    random      so many a pass, wherever the dice fall

Every order sets at least one place, so a canvas is always finished.
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
class Guesses:
    """What one pass says of the places that are masked, from left to right."""

    places: Sequence[int]
    tokens: Sequence[int]  # that were picked for them
    probability: Floats  # of these tokens, by the model itself
    margin: Floats  # by how much the likeliest token of a place leads the second
    entropy: Floats  # of the model's distribution, in nats
    drawn: Floats  # a number in [0, 1) for each place, by which a random order goes


Order = Callable[[Guesses, int], Sequence[int]]
"""Which of the guesses are kept, by their numbers; at least so many."""


def fixed(guesses: Guesses, least: int) -> list[int]:
    return _surest(guesses.probability, least)


def margin(guesses: Guesses, least: int) -> list[int]:
    return _surest(guesses.margin, least)


def random(guesses: Guesses, least: int) -> list[int]:
    return _surest(guesses.drawn, least)


@dataclass(frozen=True, slots=True)
class Threshold:
    """All that are at least so likely; if these are too few, the likeliest."""

    least: float

    def __call__(self, guesses: Guesses, least: int) -> list[int]:
        sure = int(np.count_nonzero(guesses.probability >= self.least))
        return _surest(guesses.probability, max(sure, least))


@dataclass(frozen=True, slots=True)
class Factor:
    """The n likeliest, as long as the last of them is at least 1 - factor / (n + 1) likely."""

    factor: float

    def __call__(self, guesses: Guesses, least: int) -> list[int]:
        order = _surest(guesses.probability, len(guesses.places))
        sorted_down = guesses.probability[order]
        needed = 1 - self.factor / (np.arange(len(order)) + 2)
        return order[: max(least, _leading(sorted_down >= needed))]


@dataclass(frozen=True, slots=True)
class EntropyBound:
    """The surest by entropy, as long as all but the last of them have no more than so much of it
    together: what they could be wrong about by not knowing of each other."""

    bound: float

    def __call__(self, guesses: Guesses, least: int) -> list[int]:
        order = _surest(-guesses.entropy, len(guesses.places))
        entropies = guesses.entropy[order]
        others = np.cumsum(entropies) - entropies
        return order[: max(least, _leading(others <= self.bound))]


@dataclass(frozen=True, slots=True)
class LeftRun:
    """From the left, up to the first that is not so likely."""

    least: float

    def __call__(self, guesses: Guesses, least: int) -> list[int]:
        run = _leading(guesses.probability >= self.least)
        return list(range(min(len(guesses.places), max(least, run))))


def _surest(score: Floats, count: int) -> list[int]:
    """The highest scores, highest first; of equals the one further left."""
    found: list[int] = np.argsort(-score, kind="stable")[:count].tolist()
    return found


def _leading(holds: npt.NDArray[np.bool_]) -> int:
    """How many hold before the first that does not."""
    return len(holds) if bool(holds.all()) else int(np.argmin(holds))


NAMES = ("threshold", "factor", "entropy", "left", "fixed", "margin", "random")


def order_of(
    given: Any, *, threshold: float = 0.9, factor: float = 1.0, entropy_bound: float = 0.1
) -> Order:
    """The order of this name, with its number; a function is one already."""
    if callable(given):
        return given  # type: ignore[no-any-return]
    known: dict[str, Order] = {
        "threshold": Threshold(threshold),
        "factor": Factor(factor),
        "entropy": EntropyBound(entropy_bound),
        "left": LeftRun(threshold),
        "fixed": fixed,
        "margin": margin,
        "random": random,
    }
    if given not in known:
        raise SettingsError(f"order is {given!r}; it may be {', '.join(NAMES)}, or a function")
    return known[given]


def spread(count: int, passes: int) -> list[int]:
    """How many places each of so many passes sets at least: evenly, the first ones more."""
    base, more = divmod(count, passes)
    return [base + (number < more) for number in range(passes)]
