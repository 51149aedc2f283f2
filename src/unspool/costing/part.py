"""The building blocks of a report part: figures, plotted series, an example, notes.

All parts consist of these, so that page, terminal and comparison handle every part alike. Each has
`to_dict()` for JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

VOCABULARY = "vocabulary"  # key of a machine fact; nats per token need the same vocabulary


class _JsonSerializable:
    """Base of dataclasses that are written as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(cast(Any, self))}


@dataclass(frozen=True)
class Figure(_JsonSerializable):
    """One number with an optional 95 % interval.

    Attributes:
        name: What was measured; reports are compared by it.
        value: None if it could not be measured; `why` has the reason.
        unit: "ms", "%", "nats", "" ...; a share is a fraction (0.25) with the unit "%".
        n: Number of measurements.
        why: How the number and its interval were computed, or how to read it.
        better: Which direction is better, for comparisons.
    """

    name: str
    value: float | None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    n: int | None = None
    why: str = ""
    better: Literal["lower", "higher", ""] = ""

    def formatted(self) -> str:
        """Return the value with its unit."""
        return format_number(self.value, self.unit)

    def interval(self) -> str:
        """Return the interval as text, empty if there is none."""
        if self.low is None or self.high is None:
            return ""
        low = format_number(self.low, self.unit).removesuffix(self.unit).rstrip()
        return f"{low} … {format_number(self.high, self.unit)}"


@dataclass(frozen=True)
class Series(_JsonSerializable):
    """One line of a plot; series of a part with the same `plot` share one plot."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None  # of the 95 % interval, as long as y
    high: Sequence[float] | None = None
    x_label: str = ""
    y_label: str = ""
    plot: str = ""  # title of the plot
    log_x: bool = False
    kind: Literal["line", "bars", "reference"] = "line"  # reference: drawn thin and dashed

    def __post_init__(self) -> None:
        columns = (self.x, self.y, self.low, self.high)
        sizes = {len(column) for column in columns if column is not None}
        if len(sizes) != 1:
            raise ValueError(f"the series {self.name!r} has columns of different lengths")
        if self.log_x and min(self.x, default=1) <= 0:
            raise ValueError(f"the series {self.name!r} cannot have a logarithmic axis: x <= 0")


@dataclass(frozen=True)
class TextMark(_JsonSerializable):
    """A marked range of characters in an example."""

    start: int
    end: int
    kind: str  # shown in the legend; equal kinds share a colour
    title: str = ""  # tooltip


@dataclass(frozen=True)
class Example(_JsonSerializable):
    """A text that illustrates the figures. Marks do not overlap."""

    text: str
    marks: Sequence[TextMark] = ()
    caption: str = ""

    def pieces(self) -> list[tuple[str, TextMark | None]]:
        """Split the text into marked and unmarked pieces."""
        pieces: list[tuple[str, TextMark | None]] = []
        at = 0
        for mark in sorted(self.marks, key=lambda mark: mark.start):
            start, end = max(mark.start, at), min(mark.end, len(self.text))
            if start >= end:
                continue
            if start > at:
                pieces.append((self.text[at:start], None))
            pieces.append((self.text[start:end], mark))
            at = end
        return pieces + ([(self.text[at:], None)] if at < len(self.text) else [])


@dataclass(frozen=True)
class CostPart(_JsonSerializable):
    """One measured cost.

    Attributes:
        name: As in `--parts`: waiting, loops, ...
        title: One sentence about the cost.
        formula: What is computed, in plain notation.
        notes: Limits and choices of the measurement.
        table: Rows of a table (remedies and their costs); the first is the header.
    """

    name: str
    title: str
    formula: str
    figures: Sequence[Figure] = ()
    series: Sequence[Series] = ()
    example: Example | None = None
    notes: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()
    seconds: float = field(default=0.0, compare=False)  # duration of the measurement

    def figure(self, name: str) -> Figure:
        """Return the figure with this name."""
        return next(figure for figure in self.figures if figure.name == name)


def group_parts(reports: Sequence[Sequence[CostPart]]) -> list[list[CostPart]]:
    """Group parts by name, one per report; an empty one where a report does not have it."""
    names = dict.fromkeys(part.name for parts in reports for part in parts)
    grouped = []
    for name in names:
        group = [next((part for part in parts if part.name == name), None) for parts in reports]
        template = next(part for part in group if part is not None)
        grouped.append([part or CostPart(name, template.title, template.formula) for part in group])
    return grouped


def figure_names(parts: Sequence[CostPart]) -> list[str]:
    """Return the distinct figure names of all parts, in order."""
    return list(dict.fromkeys(figure.name for part in parts for figure in part.figures))


def figure_or_empty(part: CostPart, name: str) -> Figure:
    """Return a part's figure with this name, or one without a value."""
    return next((figure for figure in part.figures if figure.name == name), Figure(name, None))


def format_number(value: float | None, unit: str = "") -> str:
    """Format a number: three digits, shares as percent."""
    if value is None:
        return "–"
    if unit == "%":
        return f"{100 * value:.3g} %" if abs(value) < 1 else f"{100 * value:.0f} %"
    if not math.isfinite(value):
        return "∞" if value > 0 else "–"
    if value == int(value) and abs(value) < 1e15:
        text = f"{int(value):,}"
    else:
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def _plain(value: Any) -> Any:
    """Return a value as plain JSON types: numpy numbers too; nan becomes None."""
    if isinstance(value, _JsonSerializable):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, bool | int):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return [_plain(item) for item in value]
