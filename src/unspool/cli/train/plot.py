"""Plot a curve with braille characters, two by four dots each."""

from __future__ import annotations

import math
from collections.abc import Sequence

_EMPTY = 0x2800
# Bit of each dot, by column and by row from the top.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def curve(values: Sequence[float], width: int = 60, height: int = 8) -> list[str]:
    """Lines of `width` characters, with the range labelled at the left."""
    means = _means(values, width * 2)
    if not means:
        return []
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    rows = height * 4
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for column, mean in enumerate(means):
        row = round((high - mean) / span * (rows - 1))
        for dot in _between(before, row):  # so that a steep curve has no gaps
            cells[dot // 4][column // 2] |= _DOTS[column % 2][dot % 4]
        before = row
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    characters = (
        "".join(chr(_EMPTY | cell) for cell in line).rstrip(chr(_EMPTY)) for line in cells
    )
    return [f"{labels.get(number, ''):>6} {line}" for number, line in enumerate(characters)]


def _means(values: Sequence[float], count: int) -> list[float]:
    """Reduce to at most `count` values by averaging."""
    if len(values) <= count:
        return list(values)
    share = len(values) / count
    parts = (values[math.floor(n * share) : math.floor((n + 1) * share)] for n in range(count))
    return [sum(part) / len(part) for part in parts]


def _between(before: int | None, row: int) -> range:
    if before is None or abs(row - before) < 2:
        return range(row, row + 1)
    return range(before + 1, row + 1) if row > before else range(row, before)
