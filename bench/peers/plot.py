"""Draw results.json: python bench/peers/plot.py results.json FOLDER (needs matplotlib)

peers.png/.svg: speed, memory and cold start of every engine; growth.png/.svg: how speed changes
with context, batch and threads.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS, THEIRS, LLAMA = "#c2410c", "#94a3b8", "#334155"
PANELS = (
    ("decode", "decode, tokens/s"),
    ("prompt", "prompt of 512, tokens/s"),
    ("batch", "16 at once, tokens/s"),
    ("memory_mb", "memory, MB"),
    ("cold", "cold start, s"),
)
AXES = (
    ("context", "context, tokens", "tokens/s, one text"),
    ("batch", "texts at once", "tokens/s, all together"),
    ("threads", "threads", "tokens/s, one text"),
)


def main(results: Path, folder: Path) -> None:
    found = json.loads(results.read_text(encoding="utf-8"))
    # Text stays text in an SVG: smaller, sharper, and it can be searched.
    plt.rcParams.update({"svg.fonttype": "none", "font.size": 9, "axes.titlesize": 10})
    peers(found, folder)
    growth(found, folder)


def peers(found: dict[str, Any], folder: Path) -> None:
    engines = {key: e for key, e in found["engines"].items() if key != "reference"}
    panels = [panel for panel in PANELS if any(e.get(panel[0]) for e in engines.values())]
    if not panels:
        return
    size = (2.6 * len(panels) + 1.2, 0.34 * len(engines) + 1.2)
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
    names = [e["title"].strip("*") for e in engines.values()]
    for axis, (field, title) in zip(axes[0], panels, strict=True):
        for place, (key, entry) in enumerate(engines.items()):
            seen = entry.get(field)
            values = seen if isinstance(seen, list) else [seen] if seen else []
            if not values:
                axis.text(0, place, " not measured", va="center", color=THEIRS, fontsize=8)
                continue
            middle = statistics.median(values)
            axis.barh(place, middle, color=OURS if key == "us" else THEIRS, height=0.7)
            if len(values) > 1:  # what it did in its worst and best round
                axis.plot([min(values), max(values)], [place, place], color="black", linewidth=1)
            axis.text(max(values), place, f" {number(middle)}", va="center", fontsize=8)
        axis.set_title(title)
        axis.set_yticks(range(len(names)), names)
        axis.set_xlim(0, axis.get_xlim()[1] * 1.15)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[0][0].invert_yaxis()
    machine = found["machine"]
    figure.suptitle(
        f"{found['model']}, {found['threads']} threads, {machine['processor']}", fontsize=9
    )
    save(figure, folder / "peers")


def growth(found: dict[str, Any], folder: Path) -> None:
    grown = found["growth"]
    kinds = [axis for axis in AXES if any(entry.get(axis[0]) for entry in grown.values())]
    if not kinds:
        return
    figure, axes = plt.subplots(1, len(kinds), figsize=(3.4 * len(kinds), 2.8), squeeze=False)
    for axis, (kind, across, up) in zip(axes[0], kinds, strict=True):
        for key, entry in grown.items():
            points = sorted((int(x), speeds) for x, speeds in entry.get(kind, {}).items())
            label = found["engines"][key]["title"].strip("*")
            line = [statistics.median(speeds) for _, speeds in points]
            axis.plot([x for x, _ in points], line, marker="o", markersize=3, label=label,
                      color=OURS if key == "us" else LLAMA)  # fmt: skip
        if kind != "threads":
            axis.set_xscale("log", base=2)
        axis.set_xlabel(across)
        axis.set_ylabel(up)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False)
    save(figure, folder / "growth")


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def save(figure: Any, file: Path) -> None:
    figure.tight_layout()
    for kind in ("png", "svg"):
        figure.savefig(file.with_suffix(f".{kind}"), dpi=160, metadata=None)
    plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
