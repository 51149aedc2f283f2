"""Draw results.json of bench/serve.py: python bench/serving/plot.py results.json FOLDER

serve.png/.svg: throughput and latencies against the number of clients. Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from peers.plot import LLAMA, OURS, plt, save

PANELS = (
    ("tokens_s", "tokens/s, all clients", 1.0, False),
    ("first_s_p99", "p99 to the first token, s", 1.0, True),
    ("gap_s_p99", "p99 between tokens, ms", 1000.0, False),
    ("request_s_p99", "p99 of a whole request, s", 1.0, True),
)


def main(results: Path, folder: Path) -> None:
    found = json.loads(results.read_text(encoding="utf-8"))
    plt.rcParams.update({"svg.fonttype": "none", "font.size": 9, "axes.titlesize": 10})
    figure, axes = plt.subplots(1, len(PANELS), figsize=(3.0 * len(PANELS), 2.8))
    for axis, (name, title, scale, wide) in zip(axes, PANELS, strict=True):
        for key, points in found["points"].items():
            line(axis, found["servers"][key]["title"], points, name, scale,
                 OURS if key == "us" else LLAMA)  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_xticks(found["clients"], [str(n) for n in found["clients"]])
        if wide:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set_title(title)
        axis.set_xlabel("clients")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    machine = found["machine"]
    figure.suptitle(
        f"{found['model']}, {found['threads']} threads, {machine['processor']}", fontsize=9
    )
    save(figure, folder / "serve")


def line(axis: Any, title: str, points: Any, name: str, scale: float, colour: str) -> None:
    """The median of the rounds, and a bar from the least to the largest."""
    across, low, mid, high = [], [], [], []
    for clients, rounds in sorted(points.items(), key=lambda point: int(point[0])):
        seen = sorted(round_[name] * scale for round_ in rounds if round_ and round_[name])
        if seen:
            half = len(seen) // 2
            middle = seen[half] if len(seen) % 2 else (seen[half - 1] + seen[half]) / 2
            across.append(int(clients))
            low.append(middle - seen[0])
            mid.append(middle)
            high.append(seen[-1] - middle)
    axis.errorbar(across, mid, yerr=[low, high], marker="o", markersize=3, capsize=2,
                  label=title.strip("*").split(" (")[0], color=colour)  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
