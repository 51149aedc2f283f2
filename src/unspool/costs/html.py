"""The cost report as an HTML page: style, SVG plots, columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unspool.costs.part import (
    VOCABULARY,
    CostPart,
    Example,
    Figure,
    Series,
    figure_names,
    figure_or_empty,
    group_parts,
)
from unspool.notebook import escape_html
from unspool.train.scaling.plot import linear_ticks, log_ticks, short_label

# -- The style sheets and the HTML frame of a report page

# Of the page, and of a standalone plot.
COLOURS = """
:root{color-scheme:light dark;--ink:#1d1f21;--paper:#fff;--raised:#f5f6f7;--line:#dfe2e5;
--dim:#5d646b;--good:#1a7f4b;
--c0:#2f6db5;--c1:#d1495b;--c2:#2e8b57;--c3:#b07d12;--c4:#7b52ab;--c5:#13899b;--c6:#8a5a44;--c7:#6b7280;
--m0:#ffe08a;--m1:#ffc2c2;--m2:#bfe3c5;--m3:#cfd8ff}
@media (prefers-color-scheme:dark){:root{--ink:#e7e9eb;--paper:#141618;--raised:#1d2023;
--line:#33383d;--dim:#9aa3ab;--good:#62c690;
--c0:#6fa8e8;--c1:#f0808d;--c2:#62c690;--c3:#e0b04a;--c4:#b394e0;--c5:#4fc3d5;--c6:#c79880;--c7:#a0a7b0;
--m0:#6b5510;--m1:#73303a;--m2:#245c3c;--m3:#38457f}}
"""
PLOTS = """svg text{font:12px system-ui,sans-serif;fill:var(--dim)}
.mid{text-anchor:middle}.end{text-anchor:end}
.axis{fill:none;stroke:var(--dim)}.grid{stroke:var(--line)}
.line{fill:none;stroke-width:2}.band{opacity:.16;stroke:none}
.whisker{fill:none;stroke-width:1.2;opacity:.6}
.reference{fill:none;stroke:var(--dim);stroke-width:1.5;stroke-dasharray:5 4}
"""

STYLE = (
    COLOURS
    + PLOTS
    + """*{box-sizing:border-box}
body{font:16px/1.55 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:0}
main{max-width:1080px;margin:0 auto;padding:1.5rem 1.25rem 4rem}
h1{font-size:1.7rem;line-height:1.2;margin:.5rem 0}
h2{font-size:1.25rem;line-height:1.3;margin:0 0 .4rem}
.sub{font-size:1.1rem;margin:.2rem 0;overflow-wrap:anywhere}
.dim{color:var(--dim);margin:.2rem 0}
.facts{display:flex;flex-wrap:wrap;gap:1rem 3rem}
dl{display:grid;grid-template-columns:auto 1fr;gap:.1rem 1rem;font-size:.85rem;margin:1rem 0}
dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:.7rem;
margin:1.2rem 0 2rem}
.card{display:block;padding:.7rem .85rem;border:1px solid var(--line);border-radius:8px;
background:var(--raised);color:inherit;text-decoration:none}
.card:hover,.card:focus-visible{border-color:var(--c0)}
.card em{font-style:normal;font-size:.78rem;color:var(--dim);display:block}
.card b{display:block;font-size:1.25rem}
.card span{font-size:.8rem;color:var(--dim)}
section{border-top:1px solid var(--line);padding:1.6rem 0 1rem}
.formula{font-size:.88rem;color:var(--dim);border-left:3px solid var(--line);padding-left:.8rem;
margin:.4rem 0 1rem;max-width:75ch}
.wide{overflow-x:auto;margin:.8rem 0}
table{border-collapse:collapse;font-size:.9rem;min-width:min(100%,30rem)}
caption{text-align:left;color:var(--dim);font-size:.8rem;padding:.2rem 0}
th,td{text-align:left;vertical-align:top;padding:.3rem .9rem .3rem 0;
border-bottom:1px solid var(--line)}
th{font-weight:600;font-size:.8rem;color:var(--dim)}
.figures td:nth-child(n+2){white-space:nowrap;font-variant-numeric:tabular-nums}
.figures td:nth-child(odd):not(:first-child){color:var(--dim)}
td small{display:block;color:var(--dim);font-size:.78rem}
td.best{color:var(--good);font-weight:600}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));
gap:1.4rem;margin:1.2rem 0}
figure{margin:0;min-width:0}
figcaption{font-weight:600;font-size:.9rem;margin-bottom:.3rem;overflow-wrap:anywhere}
svg{width:100%;height:auto;display:block}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;margin:.4rem 0;
font-size:.8rem;color:var(--dim)}
.legend i{display:inline-block;width:1rem;height:.6rem;border-radius:2px;margin-right:.35rem}
.example{margin:1.2rem 0;max-width:75ch}
.caption{font-size:.9rem;font-weight:600;margin:0 0 .4rem}
blockquote{margin:0;padding:.8rem 1rem;background:var(--raised);border-radius:8px;
white-space:pre-wrap;overflow-wrap:anywhere;max-height:22rem;overflow-y:auto}
mark{color:inherit;border-radius:3px}
.m0{background:var(--m0)}.m1{background:var(--m1)}.m2{background:var(--m2)}.m3{background:var(--m3)}
.notes{font-size:.83rem;color:var(--dim);padding-left:1.1rem;max-width:80ch}
@media (max-width:600px){main{padding:1rem .9rem 3rem}h1{font-size:1.4rem}
.figures td:nth-child(n+2){white-space:normal}th,td{padding-right:.6rem}}
"""
)

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<header>{head}<div class="facts">{facts}</div></header>
<nav class="cards" aria-label="parts">{cards}</nav>
{parts}
</main>
</body>
</html>
"""


# -- SVG plots: lines with intervals, stacked bars, dashed reference lines

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
    parts = [_axes(frame, first, [short_label(x) for x in series[0].x] if bars else None)]
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


# -- Render a report as one HTML file without scripts or external resources


@dataclass(frozen=True)
class Column:
    """One model in the report."""

    model: str
    machine: Mapping[str, str]
    parts: Sequence[CostPart]


def render_page(columns: Sequence[Column], subtitle: str) -> str:
    """Return the HTML file."""
    rows = group_parts([column.parts for column in columns])
    models = " · ".join(column.model for column in columns)
    return PAGE.format(
        title=escape_html(f"Costs of {models}"),
        style=STYLE,
        head=f"<h1>Costs of autoregressive decoding</h1><p class='sub'>{escape_html(models)}</p>"
        f"<p class='dim'>{escape_html(subtitle)}</p>",
        facts="".join(_facts(column) for column in columns),
        cards="".join(_card(parts) for parts in rows),
        parts="".join(_part(parts, columns) for parts in rows),
    )


def _facts(column: Column) -> str:
    rows = "".join(
        f"<dt>{escape_html(name)}</dt><dd>{escape_html(value)}</dd>"
        for name, value in {"model": column.model, **column.machine}.items()
    )
    return f"<dl>{rows}</dl>"


def _card(parts: Sequence[CostPart]) -> str:
    """Return a link to a part with its first figure for each model."""
    name, inside = parts[0].name, ""
    if names := figure_names(parts)[:1]:
        values = " · ".join(figure_or_empty(part, names[0]).formatted() for part in parts)
        inside = f"<b>{escape_html(values)}</b><span>{escape_html(names[0])}</span>"
    return f'<a class="card" href="#{name}"><em>{escape_html(name)}</em>{inside}</a>'


def _part(parts: Sequence[CostPart], columns: Sequence[Column]) -> str:
    part = parts[0]
    inside = [
        f"<h2>{escape_html(part.title)}</h2>",
        f"<p class='formula'>{escape_html(part.formula)}</p>",
        _figures(parts, columns),
        _plots(parts, columns),
        *(_table(item, column) for item, column in zip(parts, columns, strict=True)),
        *(_example(item, column, columns) for item, column in zip(parts, columns, strict=True)),
        _notes(part),
    ]
    return f'<section id="{part.name}">{"".join(inside)}</section>'


def _figures(parts: Sequence[CostPart], columns: Sequence[Column]) -> str:
    if not figure_names(parts):
        return ""
    several = len(columns) > 1
    heads = "".join(
        f"<th>{escape_html(column.model)}</th><th>95 % interval</th>" for column in columns
    ) if several else "<th>value</th><th>95 % interval</th><th>n</th>"  # fmt: skip
    same_vocabulary = len({column.machine.get(VOCABULARY) for column in columns}) == 1
    rows = "".join(_row(name, parts, several, same_vocabulary) for name in figure_names(parts))
    return (
        f'<div class="wide"><table class="figures"><thead><tr><th>measured</th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(name: str, parts: Sequence[CostPart], several: bool, same_tokens: bool) -> str:
    figures = [figure_or_empty(part, name) for part in parts]
    best = best_model(figures, same_tokens)
    why = next((figure.why for figure in figures if figure.why), "")
    small = f"<small>{escape_html(why)}</small>" if why else ""
    cells = f"<td>{escape_html(name)}{small}</td>"
    for number, figure in enumerate(figures):
        kind = ' class="best"' if number == best else ""
        cells += f"<td{kind}>{escape_html(figure.formatted())}</td>"
        cells += f"<td>{escape_html(figure.interval())}</td>"
    if not several:
        cells += f"<td>{'' if figures[0].n is None else f'{figures[0].n:,}'}</td>"
    return f"<tr>{cells}</tr>"


def best_model(figures: Sequence[Figure], same_tokens: bool = True) -> int | None:
    """Return the index of the model that is significantly better, None if there is none.

    Its interval must not overlap with any other. Nats are comparable only between models with the
    same vocabulary.
    """
    better = figures[0].better
    if len(figures) < 2 or not better or (figures[0].unit.startswith("nats") and not same_tokens):
        return None
    ends = [(figure.low, figure.high) for figure in figures]
    for number, (low, high) in enumerate(ends):
        others = [end for other, end in enumerate(ends) if other != number]
        if better == "lower" and high is not None:
            beaten = [other[0] is not None and high < other[0] for other in others]
        elif better == "higher" and low is not None:
            beaten = [other[1] is not None and low > other[1] for other in others]
        else:
            continue
        if all(beaten):
            return number
    return None


def _plots(parts: Sequence[CostPart], columns: Sequence[Column]) -> str:
    titles = list(dict.fromkeys(series.plot for part in parts for series in part.series))
    pictures = "".join(_plot_per_model(title, parts, columns) for title in titles)
    return f'<div class="plots">{pictures}</div>' if pictures else ""


def _plot_per_model(title: str, parts: Sequence[CostPart], columns: Sequence[Column]) -> str:
    """Return one plot per model, with the same y axis."""
    by_model = [
        [line for line in part.series if line.plot == title and len(line.x)] for part in parts
    ]
    ranges = [y_range(series) for series in by_model if series]
    if not ranges:
        return ""
    up = min(low for low, _ in ranges), max(high for _, high in ranges)
    html = ""
    for series, column in zip(by_model, columns, strict=True):
        if series:
            model = f" · {column.model}" if len(columns) > 1 else ""
            picture = plot(series, up) + _legend(series)
            html += (
                f"<figure><figcaption>{escape_html(title + model)}</figcaption>{picture}</figure>"
            )
    return html


def _legend(series: Sequence[Series]) -> str:
    if len(series) == 1:
        return ""
    items = ""
    for number, line in enumerate(series):
        style = "border-top:2px dashed var(--dim)" if line.kind == "reference" else ""
        style = style or f"background:{colour(number)}"
        items += f'<li><i style="{style}"></i>{escape_html(line.name)}</li>'
    return f"<ul class='legend'>{items}</ul>"


def _table(part: CostPart, column: Column) -> str:
    if not part.table:
        return ""
    head, *body = part.table
    top = "".join(f"<th>{escape_html(cell)}</th>" for cell in head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape_html(cell)}</td>" for cell in row) + "</tr>" for row in body
    )
    return (
        f"<div class='wide'><table><caption>{escape_html(column.model)}</caption>"
        f"<thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _example(part: CostPart, column: Column, columns: Sequence[Column]) -> str:
    example = part.example
    if example is None:
        return ""
    kinds = list(dict.fromkeys(mark.kind for mark in example.marks))
    whose = f"{column.model}: " if len(columns) > 1 else ""
    legend = "".join(
        f'<li><mark class="m{number % 4}">{escape_html(kind)}</mark></li>'
        for number, kind in enumerate(kinds)
    )
    return (
        f'<div class="example"><p class="caption">{escape_html(whose + example.caption)}</p>'
        f"<blockquote>{_marked(example, kinds)}</blockquote>"
        + (f"<ul class='legend'>{legend}</ul>" if legend else "")
        + "</div>"
    )


def _marked(example: Example, kinds: Sequence[str]) -> str:
    html = ""
    for text, mark in example.pieces():
        if mark is None:
            html += escape_html(text)
            continue
        title = f' title="{escape_html(mark.title)}"' if mark.title else ""
        html += f'<mark class="m{kinds.index(mark.kind) % 4}"{title}>{escape_html(text)}</mark>'
    return html


def _notes(part: CostPart) -> str:
    notes = [*part.notes, f"Measured in {part.seconds:.1f} s."]
    return f"<ul class='notes'>{''.join(f'<li>{escape_html(note)}</li>' for note in notes)}</ul>"
