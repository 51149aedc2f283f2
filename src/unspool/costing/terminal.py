"""Render a report as text: one line per figure, with its interval."""

from __future__ import annotations

from collections.abc import Sequence

from unspool.costing.part import CostPart, figure_names, figure_or_empty, group_parts


def summary(models: Sequence[str], reports: Sequence[Sequence[CostPart]]) -> str:
    """Return the figures of one model, or of several in columns."""
    lines: list[str] = []
    if len(models) > 1:
        lines.append("  ".join(f"[{number}] {name}" for number, name in enumerate(models, 1)))
    for parts in group_parts(reports):
        lines += ["", f"{parts[0].title}  ({parts[0].name})", *_rows(parts)]
        lines += [f"  {note}" for part in parts if not part.figures for note in part.notes]
        for number, part in enumerate(parts, 1):
            if part.table:
                lines += ["", *([f"  [{number}]"] if len(parts) > 1 else [])]
                lines += [*_aligned([[f"  {row[0]}", *row[1:]] for row in part.table])]
    return "\n".join(lines).strip("\n")


def _rows(parts: Sequence[CostPart]) -> list[str]:
    """Return a line per figure, with columns for all parts."""
    heads = [cell for number in range(len(parts)) for cell in (f"[{number + 1}]", "")]
    rows = [["", *heads]] if len(parts) > 1 else []
    for name in figure_names(parts):
        figures = [figure_or_empty(part, name) for part in parts]
        cells = [cell for figure in figures for cell in (figure.formatted(), figure.interval())]
        rows.append([f"  {name}", *cells])
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
