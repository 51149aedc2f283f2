"""A report for a terminal: every figure on a line, its interval beside it."""

from __future__ import annotations

from collections.abc import Sequence

from unspool.costing.page import found_figure
from unspool.costing.part import Part


def summary(models: Sequence[str], reports: Sequence[Sequence[Part]]) -> str:
    """The figures of one model, or of several in columns."""
    lines: list[str] = []
    if len(models) > 1:
        lines.append("  ".join(f"[{number}] {name}" for number, name in enumerate(models, 1)))
    for number, part in enumerate(reports[0]):
        same = [report[number] for report in reports]
        lines += ["", f"{part.title}  ({part.name})", *_rows(same), *_aligned(part.table)]
    return "\n".join(lines).strip("\n")


def _rows(parts: Sequence[Part]) -> list[str]:
    """A line for each figure, in the columns of all parts."""
    rows = []
    for figure in parts[0].figures:
        same = [found_figure(part, figure.name) for part in parts]
        cells = [cell for one in same for cell in (one.told(), one.interval())]
        rows.append([f"  {figure.name}", *cells])
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
