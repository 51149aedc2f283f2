"""What a part of the report consists of: figures, series to plot, an example, notes.

Every part is made of these, whatever it measures, so that the page, the terminal and a comparison
of two models know only them. All of them become JSON by `to_dict()`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast


class _Told:
    """A dataclass that becomes JSON."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON: plain numbers, texts and lists."""
        return {one.name: _plain(getattr(self, one.name)) for one in fields(cast(Any, self))}


@dataclass(frozen=True)
class Figure(_Told):
    """One number with its 95 % interval, where there is one.

    name     what was measured, in words; two reports are compared by it.
    value    None: it could not be measured here, and `why` tells the reason.
    unit     "ms", "%", "nats", "" ...; a share is given as such (0.25) with the unit "%".
    n        how many things were measured.
    why      how the number and its interval came about, or how to read it.
    better   which way is better, where one is: it colours comparisons.
    """

    name: str
    value: float | None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    n: int | None = None
    why: str = ""
    better: Literal["lower", "higher", ""] = ""

    def told(self) -> str:
        """The value with its unit, for people."""
        return number(self.value, self.unit)

    def interval(self) -> str:
        """The interval for people; empty where there is none."""
        if self.low is None or self.high is None:
            return ""
        low = number(self.low, self.unit).removesuffix(self.unit).rstrip()
        return f"{low} … {number(self.high, self.unit)}"


@dataclass(frozen=True)
class Series(_Told):
    """One line of a plot; series of a part with the same `plot` share one picture."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None  # of the 95 % interval, as long as y
    high: Sequence[float] | None = None
    x_label: str = ""
    y_label: str = ""
    plot: str = ""  # the picture's title
    log_x: bool = False
    kind: Literal["line", "bars", "reference"] = "line"  # reference: drawn thin and dashed

    def __post_init__(self) -> None:
        sizes = {len(one) for one in (self.x, self.y, self.low, self.high) if one is not None}
        if len(sizes) != 1:
            raise ValueError(f"the series {self.name!r} has columns of different lengths")
        if self.log_x and min(self.x, default=1) <= 0:
            raise ValueError(f"the series {self.name!r} cannot have a logarithmic axis: x <= 0")


@dataclass(frozen=True)
class Mark(_Told):
    """A stretch of an example's text, by characters, and what it shows."""

    start: int
    end: int
    kind: str  # a word: equal kinds have one colour, and stand in the legend
    title: str = ""  # what hovering tells


@dataclass(frozen=True)
class Example(_Told):
    """A text in which a reader sees what the figures say. Marks do not overlap."""

    text: str
    marks: Sequence[Mark] = ()
    caption: str = ""

    def pieces(self) -> list[tuple[str, Mark | None]]:
        """The text in pieces, marked and unmarked in turn."""
        found: list[tuple[str, Mark | None]] = []
        at = 0
        for mark in sorted(self.marks, key=lambda mark: mark.start):
            start, end = max(mark.start, at), min(mark.end, len(self.text))
            if start >= end:
                continue
            if start > at:
                found.append((self.text[at:start], None))
            found.append((self.text[start:end], mark))
            at = end
        return found + ([(self.text[at:], None)] if at < len(self.text) else [])


@dataclass(frozen=True)
class Part(_Told):
    """One cost, measured.

    name      as in `--parts`: waiting, loops, ...
    title     a sentence's worth of what it is.
    formula   what is computed, as one reads it aloud or in plain notation.
    notes     what a reader must know to trust it: limits, choices, what was left out.
    table     rows that belong side by side (remedies and their prices); the first is the head.
    """

    name: str
    title: str
    formula: str
    figures: Sequence[Figure] = ()
    series: Sequence[Series] = ()
    example: Example | None = None
    notes: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()
    seconds: float = field(default=0.0, compare=False)  # that measuring took

    def figure(self, name: str) -> Figure:
        """The figure of this name."""
        return next(one for one in self.figures if one.name == name)


def side_by_side(reports: Sequence[Sequence[Part]]) -> list[list[Part]]:
    """Parts of the same name together, one of each report; an empty one where it was left out."""
    names = dict.fromkeys(part.name for parts in reports for part in parts)
    found = []
    for name in names:
        own = [next((part for part in parts if part.name == name), None) for parts in reports]
        known = next(part for part in own if part is not None)
        found.append([part or Part(name, known.title, known.formula) for part in own])
    return found


def figure_names(parts: Sequence[Part]) -> list[str]:
    """The figures of all models, each once, in order."""
    return list(dict.fromkeys(figure.name for part in parts for figure in part.figures))


def found_figure(part: Part, name: str) -> Figure:
    """A part's figure of this name, or one without a value."""
    return next((one for one in part.figures if one.name == name), Figure(name, None))


def number(value: float | None, unit: str = "") -> str:
    """A number for people: three digits, shares as percent."""
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
    """As JSON knows it: also numpy's numbers; a number that is none (nan) becomes null."""
    if isinstance(value, _Told):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, bool | int):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return [_plain(one) for one in value]
