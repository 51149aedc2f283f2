"""Reports: the parts of one model, or of several models side by side.

report.html(), report.to_dict(), print(report)
Comparison([first, second]).html()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unspool.costs.html import Column, render_page
from unspool.costs.part import CostPart, figure_names, figure_or_empty, group_parts


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


VERSION = 1  # of the JSON


@dataclass(frozen=True, repr=False)
class Report:
    """The measured costs of one model."""

    model: str
    machine: Mapping[str, str]
    parts: Sequence[CostPart]
    seconds: float
    quick: bool = False
    seed: int = 0

    def __repr__(self) -> str:
        names = ", ".join(part.name for part in self.parts)
        return f"<Report {self.model}: {names}, {self.seconds:.0f} s>"

    def part(self, name: str) -> CostPart:
        """Return the part with this name."""
        return next(part for part in self.parts if part.name == name)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "version": VERSION,
            "model": self.model,
            "machine": dict(self.machine),
            "quick": self.quick,
            "seed": self.seed,
            "seconds": self.seconds,
            "parts": [part.to_dict() for part in self.parts],
        }

    def html(self) -> str:
        """Return one HTML file with plots, without scripts or external resources."""
        return Comparison([self]).html()

    def _repr_html_(self) -> str:
        """Show the page in an iframe in notebooks, as it has its own style."""
        from unspool.notebook import escape_html

        return f'<iframe srcdoc="{escape_html(self.html())}" width="100%" height="700"></iframe>'

    def __str__(self) -> str:
        return str(Comparison([self]))


@dataclass(frozen=True)
class Comparison:
    """Reports of several models, measured with the same settings on the same machine."""

    reports: Sequence[Report]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"version": VERSION, "reports": [report.to_dict() for report in self.reports]}

    def html(self) -> str:
        """Return one HTML file: figures in columns, plots side by side with the same axes."""
        columns = [Column(report.model, report.machine, report.parts) for report in self.reports]
        seconds = sum(report.seconds for report in self.reports)
        first = self.reports[0]
        kind = "quick measurement, wide intervals" if first.quick else "complete measurement"
        return render_page(columns, f"{kind}, seed {first.seed}, {seconds:.0f} s")

    def __str__(self) -> str:
        names = [report.model for report in self.reports]
        return summary(names, [report.parts for report in self.reports])
