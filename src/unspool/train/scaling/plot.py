"""Plot of a scaling study (SVG): loss by compute, by parameters, and by tokens.

Dots are runs, lines the fitted law, a ring the run that was not part of the fit. The colours suit
light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from unspool.train.scaling.study import Law, PlannedRun, Study

_WIDTH, _HEIGHT = 320, 250  # of a panel's plot area
_LEFT, _TOP, _BETWEEN, _BELOW = 62, 56, 34, 92
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#b8860b", "#3aa6c9", "#aa3377", "#888888", "#cc6d1a")
_POINTS = 60  # of a curve

Point = tuple[float, float]


@dataclass(frozen=True)
class _Panel:
    """Axes of a panel: x logarithmic, y linear in the loss."""

    x0: float
    across: tuple[float, float]
    up: tuple[float, float]

    def at(self, x: float, y: float) -> Point:
        low, high = map(math.log, self.across)
        share = (math.log(x) - low) / (high - low)
        rise = (y - self.up[0]) / (self.up[1] - self.up[0])
        return self.x0 + share * _WIDTH, _TOP + (1 - rise) * _HEIGHT


def draw(study: Study, title: str = "Loss, by compute, parameters and tokens") -> str:
    """The SVG of a fitted study."""
    law = study.law
    assert law is not None, "fit the study before drawing it"
    fitted = list(study.runs.items())
    checks = [(study.checked.run, study.checked.measured)] if study.checked else []
    runs = [run for run, _ in fitted + checks]
    depths = sorted({run.depth for run in runs})
    colour = {depth: _COLOURS[n % len(_COLOURS)] for n, depth in enumerate(depths)}
    up = _padded_range([loss for _, loss in fitted + checks], 0.06)
    parts: list[str] = []
    for number, (label, x_of, curves) in enumerate(_panels(law, runs)):
        across = _padded_range([x_of(run) for run in runs], 0.08, logarithmic=True)
        panel = _Panel(_LEFT + number * (_WIDTH + _BETWEEN + _LEFT - 20), across, up)
        parts.append(_axes(panel, label, first=number == 0))
        for name, points in curves(across):
            stroke = colour.get(name, "var(--dim)") if isinstance(name, int) else "var(--dim)"
            parts.append(_curve(panel, points, stroke, dashed=not isinstance(name, int)))
        parts += [_dot(panel.at(x_of(run), loss), colour[run.depth]) for run, loss in fitted]
        for run, loss in checks:
            parts.append(_ring(panel, x_of(run), loss, law.interval(run.parameters, run.tokens)))
    width = _LEFT + 3 * (_WIDTH + _BETWEEN + _LEFT - 20) - 20
    height = _TOP + _HEIGHT + _BELOW
    legend = _legend({f"depth {depth}": colour[depth] for depth in depths}, bool(checks))
    return _SVG.format(
        width=width, height=height, title=_escaped(title), parts="\n".join([*parts, legend]),
        law=_escaped(_formula(law)), law_y=height - 14,
    )  # fmt: skip


def _panels(
    law: Law, runs: Sequence[PlannedRun]
) -> list[
    tuple[str, Callable[[PlannedRun], float], Callable[[Point], list[tuple[object, list[Point]]]]]
]:
    """For each panel: its label, a run's x value, and the law's curves."""
    sizes = {run.depth: run.parameters for run in runs}
    budgets = sorted({run.flops for run in runs})
    smallest, largest = min(sizes.values()) / 3, max(sizes.values()) * 3

    def loss(size: float, flops: float) -> float:
        return law.loss(size, flops / token_cost(runs, size))

    def by_compute(across: Point) -> list[tuple[object, list[Point]]]:
        curves: list[tuple[object, list[Point]]] = [
            (depth, [(flops, loss(size, flops)) for flops in _steps(across)])
            for depth, size in sizes.items()
        ]
        all_sizes = _steps((smallest, largest))
        best = [(flops, min(loss(size, flops) for size in all_sizes)) for flops in _steps(across)]
        return [*curves, ("best", best)]

    def by_size(across: Point) -> list[tuple[object, list[Point]]]:
        return [
            (f"{flops:g}", [(size, loss(size, flops)) for size in _steps(across)])
            for flops in budgets
        ]

    def by_tokens(across: Point) -> list[tuple[object, list[Point]]]:
        return [
            (depth, [(d, law.loss(size, d)) for d in _steps(across)])
            for depth, size in sizes.items()
        ]

    return [
        ("compute (FLOP)", lambda run: run.flops, by_compute),
        ("parameters", lambda run: float(run.parameters), by_size),
        ("tokens", lambda run: float(run.tokens), by_tokens),
    ]


def token_cost(runs: Sequence[PlannedRun], size: float) -> float:
    """FLOPs per token of a model of any size, interpolated between the runs."""
    costs = sorted({(run.parameters, run.flops / run.tokens / run.parameters) for run in runs})
    log_sizes = [math.log(parameters) for parameters, _ in costs]
    return size * float(np.interp(math.log(size), log_sizes, [cost for _, cost in costs]))


def _steps(across: Point) -> list[float]:
    low, high = map(math.log, across)
    return [math.exp(low + (high - low) * n / (_POINTS - 1)) for n in range(_POINTS)]


def _padded_range(values: Sequence[float], margin: float, *, logarithmic: bool = False) -> Point:
    """The range of the values plus a margin."""
    low, high = min(values), max(values)
    if logarithmic:
        low, high = math.log(low), math.log(high)
    padding = (high - low or 1.0) * margin
    low, high = low - padding, high + padding
    return (math.exp(low), math.exp(high)) if logarithmic else (low, high)


def _axes(panel: _Panel, label: str, *, first: bool) -> str:
    bottom, right = _TOP + _HEIGHT, panel.x0 + _WIDTH
    parts = [f'<path class="axis" d="M{panel.x0:.1f},{_TOP} V{bottom} H{right:.1f}"/>']
    for value in log_ticks(panel.across):
        x, _ = panel.at(value, panel.up[0])
        parts.append(f'<path class="grid" d="M{x:.1f},{_TOP} V{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" class="mid">{short_label(value)}</text>')
    for value in linear_ticks(panel.up):
        _, y = panel.at(panel.across[0], value)
        parts.append(f'<path class="grid" d="M{panel.x0:.1f},{y:.1f} H{right:.1f}"/>')
        parts.append(f'<text x="{panel.x0 - 6:.1f}" y="{y + 4:.1f}" class="end">{value:g}</text>')
    middle = panel.x0 + _WIDTH / 2
    parts.append(f'<text x="{middle:.1f}" y="{bottom + 36}" class="mid name">{label}</text>')
    if first:
        y = _TOP + _HEIGHT / 2
        parts.append(
            f'<text x="16" y="{y}" class="mid name" transform="rotate(-90 16 {y})">'
            "held-out loss (nats per token)</text>"
        )
    return "\n".join(parts)


def log_ticks(across: Point) -> list[float]:
    """Tick values of a logarithmic axis: 1, 10, 100, ...; finer if these are fewer than three."""
    for factors in ((1,), (1, 3), (1, 2, 5)):
        powers = range(math.floor(math.log10(across[0])), math.ceil(math.log10(across[1])) + 1)
        ticks = [f * 10.0**p for p in powers for f in factors]
        inside = [value for value in ticks if across[0] <= value <= across[1]]
        if len(inside) >= 3:
            return inside
    return inside


def linear_ticks(up: Point) -> list[float]:
    """Tick values of a linear axis: about five round numbers."""
    rough = (up[1] - up[0]) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough)
    first = math.ceil(up[0] / step)
    count = math.floor(up[1] / step) - first + 1
    return [round((first + n) * step, 10) for n in range(count)]


def short_label(value: float) -> str:
    """Short axis label of a number: 1500 as 1.5k."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size <= value < 1e11:
            return f"{value / size:g}{letter}"
    return f"{value:.0e}".replace("e+", "e") if value >= 1e11 else f"{value:g}"


def _curve(panel: _Panel, points: Iterable[Point], stroke: str, *, dashed: bool) -> str:
    """The segments of a curve that are inside the panel."""
    pieces: list[list[str]] = [[]]
    for x, y in points:
        if panel.up[0] <= y <= panel.up[1]:
            pieces[-1].append("{:.1f},{:.1f}".format(*panel.at(x, y)))
        elif pieces[-1]:
            pieces.append([])
    kind = "best" if dashed else "law"
    return "\n".join(
        f'<polyline class="{kind}" style="stroke:{stroke}" points="{" ".join(piece)}"/>'
        for piece in pieces
        if len(piece) > 1
    )


def _dot(at: Point, colour: str) -> str:
    return f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="3.5" style="fill:{colour}"/>'


def _ring(panel: _Panel, x: float, y: float, interval: tuple[float, float] | None) -> str:
    across, up = panel.at(x, y)
    mark = f'<circle class="ring" cx="{across:.1f}" cy="{up:.1f}" r="5.5"/>'
    if interval is not None:
        low, high = (min(max(end, panel.up[0]), panel.up[1]) for end in interval)
        ends = panel.at(x, low)[1], panel.at(x, high)[1]
        mark += f'<path class="bar" d="M{across:.1f},{ends[0]:.1f} V{ends[1]:.1f}"/>'
    return mark


def _legend(colours: dict[str, str], ring: bool) -> str:
    y, x, parts = _TOP + _HEIGHT + 62, float(_LEFT), []
    for name, colour in colours.items():
        parts.append(_dot((x, y - 4), colour))
        parts.append(f'<text x="{x + 8:.1f}" y="{y}">{name}</text>')
        x += 72
    if ring:
        parts.append(f'<circle class="ring" cx="{x:.1f}" cy="{y - 4}" r="5.5"/>')
        parts.append(
            f'<text x="{x + 11:.1f}" y="{y}">not part of the fit (bar: 90 % interval)</text>'
        )
    return "\n".join(parts)


def _formula(law: Law) -> str:
    return (
        f"L = {law.e:.3f} + {law.a:.4g} / N^{law.alpha:.3f} + {law.b:.4g} / D^{law.beta:.3f}"
        "   ·   lines: the law; dashed: the compute-optimal loss, and the sizes of each budget"
    )


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


_SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" \
width="{width}" height="{height}" role="img" aria-label="{title}">
<style>
svg {{ --ink: #222; --paper: #fff; --line: #e3e3e3; --dim: #777; }}
@media (prefers-color-scheme: dark) {{
  svg {{ --ink: #e6e6e6; --paper: #161616; --line: #333; --dim: #9a9a9a; }}
}}
.paper {{ fill: var(--paper); }}
text {{ font: 11px system-ui, sans-serif; fill: var(--ink); }}
.head {{ font-size: 15px; font-weight: 600; }}
.name {{ font-size: 12px; }}
.mid {{ text-anchor: middle; }}
.end {{ text-anchor: end; }}
.axis {{ fill: none; stroke: var(--dim); }}
.grid {{ stroke: var(--line); }}
.law {{ fill: none; stroke-width: 1.3; opacity: .75; }}
.best {{ fill: none; stroke-width: 1.3; stroke-dasharray: 4 3; }}
.ring {{ fill: none; stroke: var(--ink); stroke-width: 1.8; }}
.bar {{ stroke: var(--ink); stroke-width: 1.2; }}
</style>
<rect class="paper" width="100%" height="100%"/>
<text x="20" y="28" class="head">{title}</text>
{parts}
<text x="62" y="{law_y}">{law}</text>
</svg>
"""
