"""Render a report as one HTML file: figures, plots, examples; no scripts or external resources.

One model or several side by side, with the same parts and the same axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unspool.costing.part import (
    VOCABULARY,
    CostPart,
    Example,
    Figure,
    Series,
    figure_names,
    figure_or_empty,
    group_parts,
)
from unspool.costing.style import PAGE, STYLE
from unspool.costing.svg import colour, plot, y_range
from unspool.notebook import escape_html


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


# -- figures --------------------------------------------------------------------------------------


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


# -- plots ----------------------------------------------------------------------------------------


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


# -- words ----------------------------------------------------------------------------------------


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
