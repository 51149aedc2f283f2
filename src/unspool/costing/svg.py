"""A plot as SVG: lines with their intervals, stacked bars, dashed references.

Colours are the page's (`--c0` to `--c7`, `--ink`, `--dim`, `--line`), so that a plot is readable in
light and dark. The legend belongs to the page, which can wrap it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unspool.costing.part import Series
from unspool.notebook import escape
from unspool.train.scaling.plot import decades, nice, short

WIDTH, HEIGHT = 440, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 46
_COLOURS = 8
_BANDS = 3  # around lines: more hide each other

Range = tuple[float, float]


@dataclass(frozen=True)
class _Frame:
    """Where numbers lie on the paper."""

    across: Range
    up: Range
    log: bool

    def x(self, value: float) -> float:
        low, high = self.across
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.up
        value = min(max(value, low), high)
        return _TOP + (high - value) / (high - low) * (HEIGHT - _TOP - _BOTTOM)


def plot(series: Sequence[Series], up: Range | None = None) -> str:
    """A picture of series that share their axes; `up` where several pictures share theirs."""
    first = series[0]
    bars = any(one.kind == "bars" for one in series)
    frame = _Frame(_across(series, bars), up or rise(series), first.log_x and not bars)
    parts = [_axes(frame, first, _bar_names(series) if bars else None)]
    parts += _stacks(frame, series) if bars else []
    crowded = sum(one.low is not None for one in series) > _BANDS
    for number, one in enumerate(series):
        if one.kind != "bars":
            parts.append(_interval(frame, one, colour(number), crowded))
    for number, one in enumerate(series):
        if one.kind != "bars":
            parts.append(_line(frame, one, colour(number)))
    label = escape(f"{first.plot or first.y_label}, by {first.x_label}")
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        + "".join(parts)
        + "</svg>"
    )


def colour(number: int) -> str:
    """The page's colour of the series of this number."""
    return f"var(--c{number % _COLOURS})"


def rise(series: Sequence[Series]) -> Range:
    """The range of all y, intervals included; from 0 where nothing is below."""
    if any(one.kind == "bars" for one in series):
        stacked = [sum(column) for column in zip(*(one.y for one in series), strict=True)]
        return 0.0, (max(stacked) or 1.0) * 1.05
    every = [
        value
        for one in series
        for column in (one.y, one.low or (), one.high or ())
        for value in column
        if math.isfinite(value)
    ]
    low, high = min(every, default=0.0), max(every, default=1.0)
    low = 0.0 if low >= 0 else low * 1.05
    return low, high * 1.05 if high > low else low + 1.0


def _across(series: Sequence[Series], bars: bool) -> Range:
    if bars:
        return -0.5, len(series[0].x) - 0.5
    every = [x for one in series for x in one.x]
    low, high = min(every), max(every)
    if low == high:
        return (low / 2, high * 2) if series[0].log_x else (low - 1, high + 1)
    return low, high


def _bar_names(series: Sequence[Series]) -> list[str]:
    return [short(x) for x in series[0].x]


def _axes(frame: _Frame, first: Series, names: list[str] | None) -> str:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    found = [f'<path class="axis" d="M{_LEFT},{_TOP}V{bottom}H{right}"/>']
    for value in nice(frame.up):
        y = frame.y(value)
        found.append(f'<path class="grid" d="M{_LEFT},{y:.1f}H{right}"/>')
        found.append(f'<text class="end" x="{_LEFT - 7}" y="{y + 4:.1f}">{short(value)}</text>')
    for value, name in _across_names(frame, names):
        x = frame.x(value)
        found.append(f'<text class="mid" x="{x:.1f}" y="{bottom + 17}">{name}</text>')
    middle = (_LEFT + right) / 2
    found.append(f'<text class="mid" x="{middle}" y="{HEIGHT - 8}">{escape(first.x_label)}</text>')
    y = (_TOP + bottom) / 2
    found.append(
        f'<text class="mid" x="13" y="{y}" transform="rotate(-90 13 {y})">'
        f"{escape(first.y_label)}</text>"
    )
    return "".join(found)


def _across_names(frame: _Frame, names: list[str] | None) -> Iterable[tuple[float, str]]:
    if names is not None:
        return [(float(number), name) for number, name in enumerate(names)]
    ticks = decades(frame.across) if frame.log else []
    ticks = ticks if len(ticks) > 1 else nice(frame.across)  # also where powers of ten are too few
    return [(value, short(value)) for value in ticks]


def _line(frame: _Frame, one: Series, stroke: str) -> str:
    known = [n for n, y in enumerate(one.y) if math.isfinite(y)]
    points = [(frame.x(one.x[n]), frame.y(one.y[n])) for n in known]
    path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    if one.kind == "reference":
        return f'<path class="reference" d="{path}"/>'
    found = f'<path class="line" style="stroke:{stroke}" d="{path}"/>'
    for n, (x, y) in zip(known, points, strict=True):
        title = escape(f"{one.name}: {one.y[n]:.4g} at {one.x[n]:g}")
        found += (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{stroke}">'
            f"<title>{title}</title></circle>"
        )
    return found


def _interval(frame: _Frame, one: Series, stroke: str, crowded: bool) -> str:
    """A band around the line; many would hide each other, so then a bar at each point."""
    if one.low is None or one.high is None:
        return ""
    ends = [
        (frame.x(x), frame.y(low), frame.y(high))
        for x, low, high in zip(one.x, one.low, one.high, strict=True)
        if math.isfinite(low) and math.isfinite(high)
    ]
    if crowded or len(ends) < 2:
        bars = "".join(f"M{x:.1f},{low:.1f}V{high:.1f}" for x, low, high in ends)
        return f'<path class="whisker" style="stroke:{stroke}" d="{bars}"/>' if bars else ""
    upper = [f"{x:.1f},{high:.1f}" for x, _, high in ends]
    lower = [f"{x:.1f},{low:.1f}" for x, low, _ in reversed(ends)]
    return f'<path class="band" style="fill:{stroke}" d="M{"L".join(upper + lower)}Z"/>'


def _stacks(frame: _Frame, series: Sequence[Series]) -> list[str]:
    """At each x the series on top of each other."""
    room = (frame.x(1) - frame.x(0)) * 0.55
    found = []
    for place, x in enumerate(series[0].x):
        below = 0.0
        for number, one in enumerate(series):
            value = one.y[place]
            top, bottom = frame.y(below + value), frame.y(below)
            title = escape(f"{one.name}: {value:.3g} at {x:g}")
            found.append(
                f'<rect x="{frame.x(place) - room / 2:.1f}" y="{top:.1f}" width="{room:.1f}" '
                f'height="{max(0.0, bottom - top):.1f}" style="fill:{colour(number)}">'
                f"<title>{title}</title></rect>"
            )
            below += value
    return found
