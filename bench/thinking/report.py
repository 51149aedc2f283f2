"""results.json, the tables and the plots, from everything that lies in a folder of results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinking.curves import GREEDY, ONE, curves, voting
from thinking.records import Drawn, drawn_in, searched_in
from unspool.costs import html
from unspool.costs.html import COLOURS, PLOTS
from unspool.costs.part import Series
from unspool.notebook import escape_html

Results = dict[str, Any]
# Few enough to be told apart: what sees the answer, what does not, and what goes by pieces.
PLOTTED = (
    "best-of by the exact check", "mcts by the exact check", "best-of by log-probability",
    "best-of by certainty", "vote", "beam by log-probability", "dvts by log-probability",
    "restarts by log-probability",
)  # fmt: skip


def collected(out: Path) -> Results:
    """Everything that was measured so far, by model and task."""
    settings = [json.loads(file.read_text()) for file in sorted(out.glob("settings.*.json"))]
    found: Results = {"settings": settings, "models": {}}
    for file in sorted((out / "samples").glob("*.jsonl")):
        model, task = file.stem.split("~")
        drawn, searched = drawn_in(file), searched_in(out / "searches" / file.name)
        here = found["models"].setdefault(model, {"tasks": {}})
        here["tasks"][task] = {
            "problems": len(drawn),
            "samples": len(drawn[0].samples),
            "prompt_tokens": sum(one.prompt for one in drawn) / len(drawn),
            "curves": curves(drawn, searched),
        }
    for model, here in found["models"].items():
        pooled = [
            one for file in sorted((out / "samples").glob(f"{model}~*.jsonl"))
            for one in drawn_in(file) if _voted(one)
        ]  # fmt: skip
        here["voting"] = voting(pooled) if pooled else {"bins": [], "problems": 0}
    return found


def _voted(one: Drawn) -> bool:
    return any(sample.answer is not None for sample in one.samples)


def write(out: Path) -> Results:
    """results.json, results.md, and a plot for each model."""
    found = collected(out)
    (out / "results.json").write_text(json.dumps(found, indent=1))
    (out / "results.md").write_text(tables(found))
    for model, here in found["models"].items():
        panels = [
            panel(task, told["curves"], f"{told['problems']} problems")
            for task, told in here["tasks"].items()
        ]
        (out / f"think-{model}.svg").write_text(sheet(panels))
    if any(here["voting"]["bins"] for here in found["models"].values()):
        drawn = [vote_panel(model, here["voting"]) for model, here in found["models"].items()]
        (out / "voting.svg").write_text(sheet([one for one in drawn if one[1]]))
    return found


# -- tables ------------------------------------------------------------------------------------


def tables(found: Results) -> str:
    """Every point of every curve, in Markdown."""
    lines = []
    for model, here in found["models"].items():
        for task, told in here["tasks"].items():
            lines += [
                f"### {model}, {task}", "",
                f"{told['problems']} problems, {told['samples']} samples of each; prompts of "
                f"{told['prompt_tokens']:.0f} tokens.", "",
                "| policy | n | tokens | right, % | 95 % | gain, points | 95 % | runs |",
                "|---|---|---|---|---|---|---|---|",
            ]  # fmt: skip
            lines += [
                _row(name, point) for name, points in told["curves"].items() for point in points
            ]
            lines.append("")
    return "\n".join(lines)


def _row(name: str, point: dict[str, Any]) -> str:
    bounds = f"{100 * point['low']:.1f} … {100 * point['high']:.1f}"
    gains = f"{100 * point['gain_low']:+.1f} … {100 * point['gain_high']:+.1f}"
    failed = f" ({point['errors']} failed)" if point["errors"] else ""
    return (
        f"| {name} | {point['n']} | {point['tokens']:.0f} | {100 * point['accuracy']:.1f} | "
        f"{bounds} | {100 * point['gain']:+.1f} | {gains} | {point['runs']}{failed} |"
    )


# -- plots -------------------------------------------------------------------------------------

Panel = tuple[str, list[Series]]


def panel(task: str, told: dict[str, list[dict[str, Any]]], note: str) -> Panel:
    """Accuracy against tokens: each policy begins where one sample is."""
    one = told[ONE][0]
    drawn = []
    for name in PLOTTED:
        points = [one, *told.get(name, [])]
        if len(points) > 1:
            drawn.append(
                Series(
                    name,
                    [point["tokens"] for point in points],
                    [100 * point["accuracy"] for point in points],
                    [100 * point["low"] for point in points],
                    [100 * point["high"] for point in points],
                    "tokens for a problem", "right, %", task, log_x=True,
                )
            )  # fmt: skip
    across = [x for series in drawn for x in series.x]
    level = 100 * told[GREEDY][0]["accuracy"]
    ends = [min(across), max(across)]
    drawn.append(Series(GREEDY, ends, [level, level], log_x=True, kind="reference"))
    return f"{task} ({note})", drawn


def vote_panel(model: str, told: dict[str, Any]) -> Panel:
    """What a vote gains, by how often one sample is right."""
    bins = told["bins"]
    if not bins:
        return model, []
    sizes = [gain["n"] for gain in bins[0]["gains"]]
    lines = [
        Series(
            f"vote of {n}",
            [one["right"] * 100 for one in bins],
            *[[100 * one["gains"][k][key] for one in bins] for key in ("gain", "low", "high")],
            "how often one sample is right, %", "gain over one sample, points", model,
        )
        for k, n in enumerate(sizes)
    ]  # fmt: skip
    zero = Series("no gain", [bins[0]["right"] * 100, bins[-1]["right"] * 100], [0, 0],
                  kind="reference")  # fmt: skip
    return f"{model} ({told['problems']} problems)", [*lines, zero]


def sheet(panels: Sequence[Panel], columns: int = 3) -> str:
    """Panels side by side in one SVG with one legend, readable in light and dark."""
    names = list(dict.fromkeys(s.name for _, lines in panels for s in lines if s.kind == "line"))
    width, height, head = html.WIDTH, html.HEIGHT + 30, 26 * -(-len(names) // 3) + 10
    columns = min(columns, len(panels))
    total = (columns * width, head + -(-len(panels) // columns) * height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total[0]} {total[1]}" '
        f'font-family="system-ui,sans-serif"><style>{COLOURS}{PLOTS}</style>'
        f'<rect width="{total[0]}" height="{total[1]}" style="fill:var(--paper)"/>'
    ]
    for number, name in enumerate(names):
        x, y = 20 + number % 3 * (total[0] - 20) / 3, 8 + number // 3 * 26
        parts.append(
            f'<rect x="{x}" y="{y}" width="18" height="10" style="fill:{html.colour(number)}"/>'
            f'<text x="{x + 26}" y="{y + 10}" style="fill:var(--ink)">{escape_html(name)}</text>'
        )
    for number, (title, lines) in enumerate(panels):
        x, y = number % columns * width, head + number // columns * height
        parts.append(
            f'<text x="{x + 58}" y="{y + 20}" style="fill:var(--ink)">{escape_html(title)}</text>'
        )
        picture = html.plot(_in_order(lines, names))
        place = f'<svg x="{x}" y="{y + 26}" width="{width}" height="{html.HEIGHT}" '
        parts.append(picture.replace("<svg ", place, 1))
    return "".join([*parts, "</svg>"])


def _in_order(lines: Sequence[Series], names: Sequence[str]) -> list[Series]:
    """A line's colour is by its place: where a policy is missing, an empty line keeps it."""
    here = {line.name: line for line in lines}
    model = lines[0]
    empty = [
        here.get(name)
        or Series(name, model.x[:1], [float("nan")], x_label=model.x_label, y_label=model.y_label,
                  plot=model.plot, log_x=model.log_x)
        for name in names
    ]  # fmt: skip
    return [*empty, *[line for line in lines if line.kind != "line"]]
