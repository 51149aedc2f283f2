"""Output of the benchmarks: progress, the machine, Markdown tables, JSON and SVG charts."""

import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from unspool.costs import html
from unspool.costs.html import COLOURS, PLOTS
from unspool.costs.measuring import processor_name
from unspool.costs.part import Series
from unspool.notebook import escape_html

Panel = tuple[str, list[Series]]


def say(line: str) -> None:
    """Report progress on stderr."""
    print(line, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Processor, architecture and cores; on ARM only lscpu knows the processor's name."""
    name = processor_name()
    if shutil.which("lscpu"):
        lines = subprocess.run(["lscpu"], capture_output=True, text=True).stdout.splitlines()
        values = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")]
        name = values[0] if values else name
    return {"processor": name, "architecture": platform.machine(), "cores": os.cpu_count()}


def provenance() -> dict[str, Any]:
    """What a measurement must say of itself: machine, date, commit and command."""
    git = ["git", "rev-parse", "--short=8", "HEAD"]
    folder = Path(__file__).parent
    commit = subprocess.run(git, capture_output=True, text=True, cwd=folder).stdout.strip()
    command = " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    today = datetime.date.today().isoformat()
    return {"machine": machine(), "date": today, "commit": commit, "command": command}


def describe_machine(results: dict[str, Any]) -> str:
    facts = results["machine"]
    return (
        f"{facts['processor']} ({facts['architecture']}), {results['threads']} threads on "
        f"{facts['cores']} cores; {results['model']}; medians of {results['rounds']} rounds"
    )


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def write_json(file: Path, data: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def write_results(folder: Path, results: dict[str, Any], text: str) -> None:
    """Write results.json and table.md, and print the table."""
    write_json(folder / "results.json", results)
    (folder / "table.md").write_text(text, encoding="utf-8")
    print(text)


def sheet(panels: Sequence[Panel], columns: int = 3) -> str:
    """SVG with panels side by side and one legend, for light and dark backgrounds."""
    names = list(dict.fromkeys(s.name for _, lines in panels for s in lines if s.kind == "line"))
    width, height, head = html.WIDTH, html.HEIGHT + 30, 26 * -(-len(names) // 3) + 10
    columns = min(columns, len(panels))
    size = (columns * width, head + -(-len(panels) // columns) * height)
    parts = _open_svg(*size)
    for number, name in enumerate(names):
        x, y = 20 + number % 3 * (size[0] - 20) / 3, 8 + number // 3 * 26
        parts.append(
            f'<rect x="{x}" y="{y}" width="18" height="10" style="fill:{html.colour(number)}"/>'
            + _label(x + 26, y + 10, name)
        )
    for number, (title, lines) in enumerate(panels):
        x, y = number % columns * width, head + number // columns * height
        parts.append(_label(x + 58, y + 20, title))
        place = f'<svg x="{x}" y="{y + 26}" width="{width}" height="{html.HEIGHT}" '
        parts.append(html.plot(_in_order(lines, names)).replace("<svg ", place, 1))
    return "".join([*parts, "</svg>"])


def bar_chart(
    panels: Sequence[tuple[str, dict[str, Sequence[float]]]], first: str, caption: str
) -> str:
    """SVG of horizontal bars: (title, values by label) per panel; medians, range as a line."""
    labels = list(dict.fromkeys(label for _, values in panels for label in values))
    margin, width, row, top = 170, 210, 24, 50
    parts = _open_svg(margin + len(panels) * width, top + row * len(labels) + 14)
    parts.append(_label(10, 18, caption))
    for number, label in enumerate(labels):
        parts.append(_label(10, top + row * number + 15, label))
    for panel, (title, values) in enumerate(panels):
        x = margin + panel * width
        parts.append(_label(x, top - 10, title))
        largest = max(max(numbers) for numbers in values.values() if numbers)
        scale = (width - 70) / largest
        for number, label in enumerate(labels):
            numbers, y = values.get(label) or [], top + row * number
            if not numbers:
                parts.append(_label(x, y + 15, "not measured"))
                continue
            middle = statistics.median(numbers)
            text = f"{middle:,.0f}" if middle >= 10 else f"{middle:.2f}"
            low, high = min(numbers) * scale, max(numbers) * scale
            parts.append(
                f'<rect x="{x}" y="{y + 3}" width="{middle * scale:.1f}" height="{row - 8}" '
                f'style="fill:{html.colour(0 if label == first else 1)}"/>'
                f'<path d="M{x + low:.1f} {y + 11}H{x + high:.1f}" style="stroke:var(--ink)"/>'
                + _label(x + high + 5, y + 15, text)
            )
    return "".join([*parts, "</svg>"])


def _open_svg(width: float, height: float) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui,sans-serif"><style>{COLOURS}{PLOTS}</style>'
        f'<rect width="{width}" height="{height}" style="fill:var(--paper)"/>'
    ]


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y}" style="fill:var(--ink)">{escape_html(text)}</text>'


def _in_order(lines: Sequence[Series], names: Sequence[str]) -> list[Series]:
    """Order lines by name, so that a name has one color; missing lines become empty ones."""
    present, model = {line.name: line for line in lines}, lines[0]
    labels = {"x_label": model.x_label, "y_label": model.y_label, "plot": model.plot}
    empty = [
        present.get(name) or Series(name, model.x[:1], [float("nan")], **labels, log_x=model.log_x)
        for name in names
    ]
    return [*empty, *[line for line in lines if line.kind != "line"]]
