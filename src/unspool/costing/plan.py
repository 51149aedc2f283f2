"""The measurement plan that every part gets, next to the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


def _ignore_progress(share: float) -> object:
    return None


@dataclass(frozen=True)
class MeasurementPlan:
    """Settings of a measurement.

    Attributes:
        quick: Less than a minute for all parts together, with wide intervals.
        seed: Of all random draws: the same seed measures the same texts.
        texts: Human-written texts, each of a few thousand characters.
        tell: Called with the progress of a part, 0 to 1.
        twin: A masked (bidirectional) model, if there is one.
    """

    quick: bool
    seed: int
    texts: Sequence[str]
    on_progress: Callable[[float], object] = _ignore_progress
    twin: object | None = None

    def pick(self, quick: _T, full: _T) -> _T:
        """Return the amount for a quick or for a complete measurement."""
        return quick if self.quick else full
