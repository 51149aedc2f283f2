"""The law of scaling as a picture (SVG): loss by compute, by parameters, and by tokens.

Dots are runs, lines the fitted law, a ring the run that the fit has not seen. The picture brings
its own colours for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from unspool.train.scaling.law import Law
from unspool.train.scaling.study import Planned, Study

_WIDTH, _HEIGHT = 320, 250  # of a panel's inside
_LEFT, _TOP, _BETWEEN, _BELOW = 62, 56, 34, 92
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#b8860b", "#3aa6c9", "#aa3377", "#888888", "#cc6d1a")
_POINTS = 60  # of a curve

Point = tuple[float, float]


@dataclass(frozen=True)
class _Panel:
    """Where numbers lie on the paper: across by their logarithm, up by the loss."""

    left: float
    across: tuple[float, float]
    up: tuple[float, float]

    def at(self, x: float, y: float) -> Point:
        low, high = map(math.log, self.across)
        share = (math.log(x) - low) / (high - low)
        rise = (y - self.up[0]) / (self.up[1] - self.up[0])
        return self.left + share * _WIDTH, _TOP + (1 - rise) * _HEIGHT


def draw(study: Study, title: str = "Loss, by compute, parameters and tokens") -> str:
    """The picture of a fitted study."""
    law = study.law
    assert law is not None, "fit the study before it is drawn"
    seen = list(study.runs.items())
    unseen = [(study.checked.run, study.checked.measured)] if study.checked else []
    depths = sorted({run.depth for run, _ in seen + unseen})
    colour = {depth: _COLOURS[n % len(_COLOURS)] for n, depth in enumerate(depths)}
    up = _room([loss for _, loss in seen + unseen], 0.06)
    parts: list[str] = []
    for number, (label, of, curves) in enumerate(_panels(law, [run for run, _ in seen + unseen])):
        across = _room([of(run) for run, _ in seen + unseen], 0.08, logarithmic=True)
        panel = _Panel(_LEFT + number * (_WIDTH + _BETWEEN + _LEFT - 20), across, up)
        parts.append(_axes(panel, label, first=number == 0))
        for name, points in curves(across):
            stroke = colour.get(name, "var(--dim)") if isinstance(name, int) else "var(--dim)"
            parts.append(_curve(panel, points, stroke, dashed=not isinstance(name, int)))
        parts += [_dot(panel.at(of(run), loss), colour[run.depth]) for run, loss in seen]
        for run, loss in unseen:
            parts.append(_ring(panel, of(run), loss, law.interval(run.parameters, run.tokens)))
    width = _LEFT + 3 * (_WIDTH + _BETWEEN + _LEFT - 20) - 20
    height = _TOP + _HEIGHT + _BELOW
    legend = _legend({f"depth {depth}": colour[depth] for depth in depths}, bool(unseen))
    return _SVG.format(
        width=width, height=height, title=_escaped(title), parts="\n".join([*parts, legend]),
        law=_escaped(_in_words(law)), law_y=height - 14,
    )  # fmt: skip


def _panels(
    law: Law, runs: Sequence[Planned]
) -> list[
    tuple[str, Callable[[Planned], float], Callable[[Point], list[tuple[object, list[Point]]]]]
]:
    """For each panel: its label, a run's place on it, and the law's curves."""
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
        every = _steps((smallest, largest))
        best = [(flops, min(loss(size, flops) for size in every)) for flops in _steps(across)]
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


def token_cost(runs: Sequence[Planned], size: float) -> float:
    """What a token costs a model of any size: 6N, and attention's share as between the runs."""
    known = sorted({(run.parameters, run.flops / run.tokens / run.parameters) for run in runs})
    sizes, costs = [math.log(one[0]) for one in known], [one[1] for one in known]
    return size * float(np.interp(math.log(size), sizes, costs))


def _steps(across: Point) -> list[float]:
    low, high = map(math.log, across)
    return [math.exp(low + (high - low) * n / (_POINTS - 1)) for n in range(_POINTS)]


def _room(values: Sequence[float], margin: float, *, logarithmic: bool = False) -> Point:
    """The values' range, with some air around it."""
    low, high = min(values), max(values)
    if logarithmic:
        low, high = math.log(low), math.log(high)
    air = (high - low or 1.0) * margin
    low, high = low - air, high + air
    return (math.exp(low), math.exp(high)) if logarithmic else (low, high)


# -- marks ----------------------------------------------------------------------------------


def _axes(panel: _Panel, label: str, *, first: bool) -> str:
    bottom, right = _TOP + _HEIGHT, panel.left + _WIDTH
    found = [f'<path class="axis" d="M{panel.left:.1f},{_TOP} V{bottom} H{right:.1f}"/>']
    for value in decades(panel.across):
        x, _ = panel.at(value, panel.up[0])
        found.append(f'<path class="grid" d="M{x:.1f},{_TOP} V{bottom}"/>')
        found.append(f'<text x="{x:.1f}" y="{bottom + 16}" class="mid">{short(value)}</text>')
    for value in nice(panel.up):
        _, y = panel.at(panel.across[0], value)
        found.append(f'<path class="grid" d="M{panel.left:.1f},{y:.1f} H{right:.1f}"/>')
        found.append(f'<text x="{panel.left - 6:.1f}" y="{y + 4:.1f}" class="end">{value:g}</text>')
    middle = panel.left + _WIDTH / 2
    found.append(f'<text x="{middle:.1f}" y="{bottom + 36}" class="mid name">{label}</text>')
    if first:
        y = _TOP + _HEIGHT / 2
        found.append(
            f'<text x="16" y="{y}" class="mid name" transform="rotate(-90 16 {y})">'
            "held-out loss (nats a token)</text>"
        )
    return "\n".join(found)


def decades(across: Point) -> list[float]:
    """1, 10, 100, ... in the range; 1, 3, 10, ... where that gives too few."""
    for factors in ((1,), (1, 3), (1, 2, 5)):
        powers = range(math.floor(math.log10(across[0])), math.ceil(math.log10(across[1])) + 1)
        found = [f * 10.0**p for p in powers for f in factors]
        inside = [value for value in found if across[0] <= value <= across[1]]
        if len(inside) >= 3:
            return inside
    return inside


def nice(up: Point) -> list[float]:
    """About five round numbers in the range."""
    rough = (up[1] - up[0]) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough)
    first = math.ceil(up[0] / step)
    count = math.floor(up[1] / step) - first + 1
    return [round((first + n) * step, 10) for n in range(count)]


def short(value: float) -> str:
    """A number as it stands at an axis: 1500 as 1.5k."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size <= value < 1e11:
            return f"{value / size:g}{letter}"
    return f"{value:.0e}".replace("e+", "e") if value >= 1e11 else f"{value:g}"


def _curve(panel: _Panel, points: Iterable[Point], stroke: str, *, dashed: bool) -> str:
    """The part of a curve that lies inside the panel."""
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
    found = f'<circle class="ring" cx="{across:.1f}" cy="{up:.1f}" r="5.5"/>'
    if interval is not None:
        low, high = (min(max(end, panel.up[0]), panel.up[1]) for end in interval)
        ends = panel.at(x, low)[1], panel.at(x, high)[1]
        found += f'<path class="bar" d="M{across:.1f},{ends[0]:.1f} V{ends[1]:.1f}"/>'
    return found


def _legend(colours: dict[str, str], ring: bool) -> str:
    y, x, found = _TOP + _HEIGHT + 62, float(_LEFT), []
    for name, colour in colours.items():
        found.append(_dot((x, y - 4), colour))
        found.append(f'<text x="{x + 8:.1f}" y="{y}">{name}</text>')
        x += 72
    if ring:
        found.append(f'<circle class="ring" cx="{x:.1f}" cy="{y - 4}" r="5.5"/>')
        found.append(
            f'<text x="{x + 11:.1f}" y="{y}">not seen by the fit (bar: 90 % interval)</text>'
        )
    return "\n".join(found)


def _in_words(law: Law) -> str:
    return (
        f"L = {law.e:.3f} + {law.a:.4g} / N^{law.alpha:.3f} + {law.b:.4g} / D^{law.beta:.3f}"
        "   ·   lines: the law; dashed: the best for each compute, and each budget's sizes"
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
