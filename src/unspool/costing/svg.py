"""SVG plots: lines with intervals, stacked bars, dashed reference lines.

Colours are CSS variables of the page (`--c0` to `--c7`, `--ink`, `--dim`, `--line`), for light and
dark mode. The legend is part of the page, which can wrap it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unspool.costing.part import Series
from unspool.notebook import escape_html
from unspool.train.scaling.plot import linear_ticks, log_ticks, short_label

WIDTH, HEIGHT = 440, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 46
_COLOURS = 8
_MAX_BANDS = 3  # interval bands in a plot; more would hide each other

Range = tuple[float, float]


@dataclass(frozen=True)
class _Frame:
    """Maps values to SVG coordinates."""

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
    """Return a plot of series with common axes; `up` is the y range if plots share it."""
    first = series[0]
    bars = any(line.kind == "bars" for line in series)
    frame = _Frame(x_range(series, bars), up or y_range(series), first.log_x and not bars)
    parts = [_axes(frame, first, _bar_names(series) if bars else None)]
    parts += _stacks(frame, series) if bars else []
    crowded = sum(line.low is not None for line in series) > _MAX_BANDS
    for number, line in enumerate(series):
        if line.kind != "bars":
            parts.append(_interval(frame, line, colour(number), crowded))
    for number, line in enumerate(series):
        if line.kind != "bars":
            parts.append(_line(frame, line, colour(number)))
    label = escape_html(f"{first.plot or first.y_label}, by {first.x_label}")
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        + "".join(parts)
        + "</svg>"
    )


def colour(number: int) -> str:
    """Return the colour of series `number`."""
    return f"var(--c{number % _COLOURS})"


def y_range(series: Sequence[Series]) -> Range:
    """Return the range of all y values and intervals; it starts at 0 if none is negative."""
    if any(line.kind == "bars" for line in series):
        stacked = [sum(column) for column in zip(*(line.y for line in series), strict=True)]
        return 0.0, (max(stacked) or 1.0) * 1.05
    every = [
        value
        for line in series
        for column in (line.y, line.low or (), line.high or ())
        for value in column
        if math.isfinite(value)
    ]
    low, high = min(every, default=0.0), max(every, default=1.0)
    low = 0.0 if low >= 0 else low * 1.05
    return low, high * 1.05 if high > low else low + 1.0


def x_range(series: Sequence[Series], bars: bool) -> Range:
    if bars:
        return -0.5, len(series[0].x) - 0.5
    every = [x for line in series for x in line.x]
    low, high = min(every), max(every)
    if low == high:
        return (low / 2, high * 2) if series[0].log_x else (low - 1, high + 1)
    return low, high


def _bar_names(series: Sequence[Series]) -> list[str]:
    return [short_label(x) for x in series[0].x]


def _axes(frame: _Frame, first: Series, names: list[str] | None) -> str:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = [f'<path class="axis" d="M{_LEFT},{_TOP}V{bottom}H{right}"/>']
    for value in linear_ticks(frame.up):
        y = frame.y(value)
        parts.append(f'<path class="grid" d="M{_LEFT},{y:.1f}H{right}"/>')
        parts.append(
            f'<text class="end" x="{_LEFT - 7}" y="{y + 4:.1f}">{short_label(value)}</text>'
        )
    for value, name in _across_names(frame, names):
        x = frame.x(value)
        parts.append(f'<text class="mid" x="{x:.1f}" y="{bottom + 17}">{name}</text>')
    middle = (_LEFT + right) / 2
    parts.append(
        f'<text class="mid" x="{middle}" y="{HEIGHT - 8}">{escape_html(first.x_label)}</text>'
    )
    y = (_TOP + bottom) / 2
    parts.append(
        f'<text class="mid" x="13" y="{y}" transform="rotate(-90 13 {y})">'
        f"{escape_html(first.y_label)}</text>"
    )
    return "".join(parts)


def _across_names(frame: _Frame, names: list[str] | None) -> Iterable[tuple[float, str]]:
    if names is not None:
        return [(float(number), name) for number, name in enumerate(names)]
    ticks = log_ticks(frame.across) if frame.log else []
    ticks = (
        ticks if len(ticks) > 1 else linear_ticks(frame.across)
    )  # also where powers of ten are too few
    return [(value, short_label(value)) for value in ticks]


def _line(frame: _Frame, line: Series, stroke: str) -> str:
    finite = [n for n, y in enumerate(line.y) if math.isfinite(y)]
    points = [(frame.x(line.x[n]), frame.y(line.y[n])) for n in finite]
    path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    if line.kind == "reference":
        return f'<path class="reference" d="{path}"/>'
    svg = f'<path class="line" style="stroke:{stroke}" d="{path}"/>'
    for n, (x, y) in zip(finite, points, strict=True):
        title = escape_html(f"{line.name}: {line.y[n]:.4g} at {line.x[n]:g}")
        svg += (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{stroke}">'
            f"<title>{title}</title></circle>"
        )
    return svg


def _interval(frame: _Frame, line: Series, stroke: str, crowded: bool) -> str:
    """Return a band around the line, or an error bar at each point if the plot is crowded."""
    if line.low is None or line.high is None:
        return ""
    ends = [
        (frame.x(x), frame.y(low), frame.y(high))
        for x, low, high in zip(line.x, line.low, line.high, strict=True)
        if math.isfinite(low) and math.isfinite(high)
    ]
    if crowded or len(ends) < 2:
        bars = "".join(f"M{x:.1f},{low:.1f}V{high:.1f}" for x, low, high in ends)
        return f'<path class="whisker" style="stroke:{stroke}" d="{bars}"/>' if bars else ""
    upper = [f"{x:.1f},{high:.1f}" for x, _, high in ends]
    lower = [f"{x:.1f},{low:.1f}" for x, low, _ in reversed(ends)]
    return f'<path class="band" style="fill:{stroke}" d="M{"L".join(upper + lower)}Z"/>'


def _stacks(frame: _Frame, series: Sequence[Series]) -> list[str]:
    """Return stacked bars."""
    room = (frame.x(1) - frame.x(0)) * 0.55
    bars = []
    for index, x in enumerate(series[0].x):
        below = 0.0
        for number, line in enumerate(series):
            value = line.y[index]
            top, bottom = frame.y(below + value), frame.y(below)
            title = escape_html(f"{line.name}: {value:.3g} at {x:g}")
            bars.append(
                f'<rect x="{frame.x(index) - room / 2:.1f}" y="{top:.1f}" width="{room:.1f}" '
                f'height="{max(0.0, bottom - top):.1f}" style="fill:{colour(number)}">'
                f"<title>{title}</title></rect>"
            )
            below += value
    return bars
