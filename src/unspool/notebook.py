"""Results as HTML for notebooks: tokens tinted by probability, with details on hover.

Each output is self-contained: it has its own style and needs no script. Tints are half transparent
and text has the notebook's own colour, so that it is readable on light and dark pages. The details
are in a table too, for readers without a mouse. Everything is escaped: models may write `<script>`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# From likely to surprising: the least probability, and the tint.
_SCALE = (
    (0.9, "60 160 90 / 0.10"),
    (0.6, "110 170 60 / 0.22"),
    (0.3, "220 180 0 / 0.28"),
    (0.1, "240 140 30 / 0.34"),
    (0.0, "230 60 60 / 0.36"),
)
STYLE = """
.unspool{color:var(--jp-content-font-color1,inherit);font:14px/1.7 var(--jp-content-font-family,
system-ui,sans-serif);max-width:60em}
.unspool .text{white-space:pre-wrap;overflow-wrap:anywhere;margin:.25em 0}
.unspool .text span{border-radius:3px}
.unspool .text span:hover{outline:1px solid currentColor}
.unspool .note{font-size:12px;margin:.25em 0}
.unspool .note span{border-radius:3px;padding:0 .4em;margin-left:.3em}
.unspool summary{cursor:pointer;font-size:12px}
.unspool table{border-collapse:collapse;font-size:12px;margin:.25em 0}
div.unspool table th,
div.unspool table td{text-align:left!important;padding:.1em .6em;white-space:pre-wrap;color:inherit;
border-bottom:1px solid rgb(128 128 128 / 0.3);vertical-align:top}
.unspool .bar{display:inline-block;height:.7em;background:rgb(60 120 220 / 0.7);border-radius:2px}
.unspool .bar.less{background:rgb(230 90 60 / 0.7)}
"""


@dataclass(frozen=True, slots=True)
class NotebookToken:
    """A token as a notebook shows it."""

    text: str
    probability: float | None  # None: no token before it
    facts: Sequence[str] = ()  # shown on hover and in the table
    display_text: str | None = None  # shown in the text instead of `text`


def escape_html(text: str) -> str:
    """Escape a text for HTML, also inside quotes."""
    for plain, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(plain, safe)
    return text


def notebook_html(*parts: str) -> str:
    """Wrap the parts of one notebook output."""
    return f'<div class="unspool"><style>{STYLE}</style>{"".join(parts)}</div>'


def text_html(pieces: Iterable[NotebookToken], before: str = "") -> str:
    """Return tokens as tinted spans, each with its facts as the title."""
    spans = []
    for piece in pieces:
        title = escape_html("\n".join([repr(piece.text), *piece.facts]))
        text = escape_html(piece.text if piece.display_text is None else piece.display_text)
        spans.append(f'<span style="{tint_style(piece.probability)}" title="{title}">{text}</span>')
    return f'<div class="text">{escape_html(before)}{"".join(spans)}</div>'


def steps_table(pieces: Sequence[NotebookToken]) -> str:
    """Return the facts of all tokens as a collapsed table."""
    rows = "".join(
        f"<tr><td>{number}</td><td>{escape_html(repr(piece.text))}</td>"
        f"<td>{escape_html('; '.join(piece.facts))}</td></tr>"
        for number, piece in enumerate(pieces)
    )
    head = "<tr><th>number</th><th>token</th><th>details</th></tr>"
    count = f"{len(pieces)} tokens, one by one"
    return f"<details><summary>{count}</summary><table>{head}{rows}</table></details>"


def legend_html() -> str:
    """Return the legend of the tints."""
    labels = [f"≥ {least:.0%}" for least, _ in _SCALE[:-1]] + [f"< {_SCALE[-2][0]:.0%}"]
    scale = "".join(
        f'<span style="{tint_style(least)}">{escape_html(label)}</span>'
        for (least, _), label in zip(_SCALE, labels, strict=True)
    )
    return f'<div class="note">probability{scale}</div>'


def note_html(text: str) -> str:
    """Return a line of small text."""
    return f'<div class="note">{escape_html(text)}</div>'


def table_html(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; its cells are HTML already."""
    top = "".join(f"<th>{escape_html(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def bar_html(value: float, largest: float) -> str:
    """Return a bar whose length is a number; negative ones have another colour."""
    width = 12 * abs(value) / largest if largest > 0 else 0.0
    kind = "bar less" if value < 0 else "bar"
    return f'<span class="{kind}" style="width:{width:.2f}em"></span>'


def tinted_html(text: str, probability: float) -> str:
    """Return a text on the tint of a probability."""
    return f'<span style="{tint_style(probability)}">{escape_html(text)}</span>'


def percent(probability: float) -> str:
    """Format a probability."""
    return f"{probability:.1%}" if probability >= 0.001 else f"{probability:.2g}"


def tint_style(probability: float | None) -> str:
    """Return the CSS of a probability's tint; empty for None."""
    if probability is None:
        return ""
    colour = next((tint for least, tint in _SCALE if probability >= least), _SCALE[-1][1])
    return f"background:rgb({colour})"
