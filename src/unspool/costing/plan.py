"""How much is measured: what every part is given beside the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


def _nobody(share: float) -> object:
    return None


@dataclass(frozen=True)
class Plan:
    """What to measure with.

    quick    a look in well under a minute for all parts together, with wide intervals.
    seed     of everything that is drawn: the same seed measures the same texts.
    texts    texts that people wrote, each a few thousand characters.
    tell     hears how much of a part is done: 0 to 1.
    twin     a masked model that reads both ways, where there is one.
    """

    quick: bool
    seed: int
    texts: Sequence[str]
    tell: Callable[[float], object] = _nobody
    twin: object | None = None

    def pick(self, quick: _T, whole: _T) -> _T:
        """One of two amounts."""
        return quick if self.quick else whole
