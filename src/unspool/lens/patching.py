"""Causal tracing: replace or remove one part of a run at a time, and measure the effect.

    sweep = patch(lm, "The capital of Italy is", "The capital of France is",
                  answer=" Rome", other=" Paris")
    sweep.values            # [layers, positions]: the metric of each patched run
    sweep.restored          # the same, 0 as in the corrupted run, 1 as in the clean run
    patch(..., approximate=True)      # all cells from one gradient (attribution patching)

    ablate(lm, text, answer=" Rome").values     # [layers, heads]: each head removed in turn

A cell of a sweep is one run of the text under its own interventions. The runs are branches of one
engine: they are computed in the same steps, and share what precedes the first change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any, Literal

import numpy as np

from unspool.backends.interventions import Intervention, MeanAblate, Replace, Scale, resolve
from unspool.backends.step import Floats, Logits
from unspool.errors import SettingsError, count
from unspool.lens.activation_cache import (
    PER_LAYER,
    Layers,
    Positions,
    Reading,
    activation_cache,
    activation_caches,
    check_layers,
    check_positions,
    parse_site,
)
from unspool.lens.activations import TextLike, adapter_name, resolve_token, to_numpy, to_token_ids
from unspool.lens.gradients import attribution_effects, check_plain, logit_goal
from unspool.notebook import escape_html, note_html, notebook_html
from unspool.progress import ProgressCallback, progress_bar
from unspool.sampling import score
from unspool.session import Session

Metric = Callable[[Floats], float]
Axis = Literal["layer", "position", "head"]
AXES: tuple[Axis, ...] = ("layer", "position", "head")
_GROUP_RUNS = 64  # runs that are computed together

Cell = tuple[int, ...]  # layer, position and head of a run, of the axes that are swept


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """The metric of many runs, each under its own interventions."""

    site: str  # that is changed
    metric: str  # what the values are
    axes: tuple[str, ...]  # of `values`: layer, position, head
    labels: tuple[tuple[str, ...], ...]  # of each axis
    values: Floats  # the metric of each run
    baseline: float  # without interventions: of the corrupted run, or of the text
    clean: float | None = None  # of the clean run, if there is one
    # What each run has changed, by its index in `values`.
    cells: Mapping[Cell, tuple[Intervention, ...]] = field(default_factory=dict, repr=False)
    is_estimate: bool = False  # from one gradient, instead of a run for each value

    @property
    def effects(self) -> Floats:
        """Values minus the baseline."""
        return np.asarray(self.values - np.float32(self.baseline))

    @property
    def restored(self) -> Floats:
        """Effects as a share of the difference between the clean and the corrupted run."""
        if self.clean is None:
            raise SettingsError("only a sweep with a clean and a corrupted run restores something")
        distance = self.clean - self.baseline
        if not distance:
            raise SettingsError(
                f"the metric is {self.clean:.4g} in both runs, so nothing can be restored"
            )
        return np.asarray(self.effects / np.float32(distance))

    def interventions(self, *index: int) -> tuple[Intervention, ...]:
        """Return what a cell has done to its run, for `lm.generate(..., interventions=...)`."""
        cell = tuple(range(size)[n] for n, size in zip(index, self.values.shape, strict=True))
        return self.cells.get(cell, ())

    def strongest(self, n: int = 5) -> list[dict[str, Any]]:
        """Return the cells with the largest effects, largest first."""
        order = np.argsort(-np.abs(self.effects), axis=None, kind="stable")[:n]
        rows = []
        for flat in order.tolist():
            index = np.unravel_index(flat, self.values.shape)
            named = {
                axis: labels[at]
                for axis, labels, at in zip(self.axes, self.labels, index, strict=True)
            }
            effect = float(self.effects[index])
            rows.append({**named, "value": float(self.values[index]), "effect": effect})
        return rows

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "site": self.site,
            "metric": self.metric,
            "axes": list(self.axes),
            "labels": [list(labels) for labels in self.labels],
            "values": np.round(self.values.astype(np.float64), 6).tolist(),
            "baseline": self.baseline,
            "clean": self.clean,
            "is_estimate": self.is_estimate,
        }

    def __repr__(self) -> str:
        shape = " x ".join(
            count(size, axis) for size, axis in zip(self.values.shape, self.axes, strict=True)
        )
        runs = f"baseline {self.baseline:.4g}"
        if self.clean is not None:
            runs = f"corrupted {self.baseline:.4g}, clean {self.clean:.4g}"
        estimated = ", estimated" if self.is_estimate else ""
        return f"<Sweep of {self.site} over {shape}: {self.metric}, {runs}{estimated}>"

    def _repr_html_(self) -> str:
        return notebook_html(note_html(self.describe()), _heatmap_html(self))

    def describe(self) -> str:
        """Say in one line what the values are."""
        if self.clean is None:
            return f"{self.metric} without {self.site}; with all of it {self.baseline:.3g}"
        estimated = ", estimated from one gradient" if self.is_estimate else ""
        return (
            f"{self.metric} when {self.site} is patched from the clean run{estimated}; corrupted "
            f"{self.baseline:.3g}, clean {self.clean:.3g}"
        )

    def table(self) -> tuple[list[str], list[str], Floats]:
        """Return labels of rows, labels of columns, and effects as a table.

        Rows are the first axis; the others are joined.
        """
        labels = (
            [" ".join(names) for names in product(*self.labels[1:])]
            if len(self.axes) > 1
            else [self.metric]
        )
        return list(self.labels[0]), labels, self.effects.reshape(len(self.values), -1)


def _heatmap_html(sweep: Sweep) -> str:
    rows, columns, effects = sweep.table()
    largest = float(np.abs(effects).max()) or 1.0
    head = "".join(f"<th>{escape_html(name)}</th>" for name in ("", *columns))
    body = []
    for label, values in zip(rows, effects.tolist(), strict=True):
        cells = "".join(
            f'<td style="background:rgb({_tint(value / largest)})" '
            f'title="{sweep.baseline + value:.4g}">{value:+.2f}</td>'
            for value in values
        )
        body.append(f"<tr><th>{escape_html(label)}</th>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(body)}</table>"


def _tint(share: float) -> str:
    """Return the colour of an effect from -1 to 1: orange below zero, blue above."""
    colour = "60 120 220" if share > 0 else "230 90 60"
    return f"{colour} / {abs(share) * 0.8:.2f}"


# -- metrics


@dataclass(frozen=True, slots=True)
class _Score:
    """How a run is measured."""

    label: str
    measure: Callable[[Floats], float]  # from the logits of the last positions
    num_logits: int = 1
    tokens: tuple[int, int | None] | None = None  # answer and other, if it is about them


def _make_score(
    lm: Session,
    tokens: Sequence[int],
    metric: Metric | None,
    answer: int | str | None,
    other: int | str | None,
) -> _Score:
    if metric is not None:
        if answer is not None or other is not None:
            raise SettingsError("give either metric or answer, not both")
        if not callable(metric):
            raise SettingsError(
                "metric must be a function of the logits [vocabulary] at the last position, got "
                f"{metric!r}"
            )
        label = getattr(metric, "__name__", "metric")
        return _Score(label, lambda logits: float(metric(logits[-1])))
    if answer is None:
        if other is not None:
            raise SettingsError("other needs an answer to be compared with")
        if len(tokens) < 2:
            raise SettingsError("the log-probability of a text needs at least 2 tokens")
        targets = list(tokens[1:])
        return _Score(
            "mean logprob of the text",
            lambda logits: float(np.mean(score(logits[:-1], targets).logprobs)),
            len(tokens),
        )
    target = resolve_token(lm, answer)
    name = _token_label(lm, target)
    if other is None:
        return _Score(
            f"logprob of {name}",
            lambda logits: float(score(logits[-1:], [target]).logprobs[0]),
            tokens=(target, None),
        )
    rival = resolve_token(lm, other)
    return _Score(
        f"logit of {name} - {_token_label(lm, rival)}",
        lambda logits: float(logits[-1, target]) - float(logits[-1, rival]),
        tokens=(target, rival),
    )


def _token_label(lm: Session, token: int) -> str:
    text = lm.readable(token)
    return repr(text) if text else f"token {token}"


# -- runs


def run_branches(
    lm: Session,
    tokens: Sequence[int],
    runs: Iterable[Sequence[Intervention]],
    num_logits: int = 1,
    adapter: str | None = None,
) -> Iterator[Logits]:
    """Yield the last logits of one text under each set of interventions, many in one batch."""
    remaining = iter(runs)
    while group := list(islice(remaining, _GROUP_RUNS)):
        with ExitStack() as stack:
            branches = [
                stack.enter_context(
                    lm.open_branch(tokens, adapter, resolve(tuple(run), len(tokens)))
                )
                for run in group
            ]
            yield from lm.engine.extend_all(
                [(branch, ()) for branch in branches], num_logits=num_logits
            )


def _run_sweep(
    lm: Session,
    tokens: Sequence[int],
    cells: Mapping[Cell, tuple[Intervention, ...]],
    shape: tuple[int, ...],
    metric: _Score,
    baseline: float,
    adapter: str | None,
    report: ProgressCallback,
) -> Floats:
    values = np.full(shape, baseline, np.float32)
    runs = run_branches(lm, tokens, cells.values(), metric.num_logits, adapter)
    for number, (cell, logits) in enumerate(zip(cells, runs, strict=True), 1):
        values[cell] = metric.measure(to_numpy(logits))
        report(number)
    return values


def patch(
    lm: Session,
    clean: TextLike,
    corrupted: TextLike,
    *,
    metric: Metric | None = None,
    answer: int | str | None = None,
    other: int | str | None = None,
    site: str = "resid_post",
    sweep: Sequence[Axis] | None = None,
    layers: Layers = None,
    positions: Positions = None,
    heads: Sequence[int] | None = None,
    approximate: bool = False,
    progress: bool = True,
) -> Sweep:
    """Activation patching; see `LanguageModel.patch`."""
    lm.config.require_head()
    tokens, source = to_token_ids(lm, corrupted), to_token_ids(lm, clean)
    if len(tokens) != len(source):
        raise SettingsError(
            "the clean and the corrupted text must have the same number of tokens, got "
            f"{len(source)} and {len(tokens)}: {lm.readable_all(source)} and "
            f"{lm.readable_all(tokens)}"
        )
    if tokens == source:
        raise SettingsError("the clean and the corrupted text are the same")
    if metric is None and answer is None:
        raise SettingsError("patch needs a metric, or an answer: the token that the clean run says")
    grid = _Grid.parse(lm, tokens, site, sweep, layers, positions, heads)
    scored = _make_score(lm, tokens, metric, answer, other)
    adapter = adapter_name(corrupted)
    # Before the first difference, both runs are the same.
    first = next(n for n, (a, b) in enumerate(zip(source, tokens, strict=True)) if a != b)
    grid = grid.starting_at(first)
    cache = activation_cache(
        lm, source, sites=grid.site, layers=grid.layers or None, positions=slice(first, None)
    )
    baseline, restored = (
        scored.measure(to_numpy(logits))
        for text in (tokens, source)
        for logits in run_branches(lm, text, [()], scored.num_logits, adapter)
    )

    def replacement(layers: tuple[int, ...], span: range, head: int | None) -> Intervention:
        part = slice(span.start - first, span.stop - first)
        if layers:
            values = np.stack([cache[grid.site, layer][part] for layer in layers])
        else:
            values = cache[grid.site][None, part]
        if grid.has_heads:
            values = (
                values[..., head, :] if head is not None else values.reshape(*values.shape[:2], -1)
            )
        return Intervention(
            grid.site,
            Replace(values),
            layers=layers or None,
            positions=span,
            heads=None if head is None else (head,),
        )

    cells = grid.cells(replacement)
    if approximate:
        check_plain(lm, corrupted)
        values = baseline + _approximate_effects(lm, source, tokens, grid, scored)
    else:
        with progress_bar("patching", len(cells), show=progress) as report:
            values = _run_sweep(lm, tokens, cells, grid.shape, scored, baseline, adapter, report)
    return Sweep(
        grid.site, scored.label, grid.axes, grid.labels(lm), values, baseline, restored, cells,
        approximate,
    )  # fmt: skip


def _approximate_effects(
    lm: Session,
    clean: Sequence[int],
    corrupted: Sequence[int],
    grid: _Grid,
    metric: _Score,
) -> Floats:
    """Estimate the effect of each cell by gradients."""
    if metric.tokens is None:
        raise SettingsError("approximate patching needs an answer, not a function as metric")
    target, rival = metric.tokens
    goal = logit_goal(target, rival, is_logprob=rival is None)
    effects = attribution_effects(lm, clean, corrupted, grid.site, grid.layers, goal)
    num_heads = lm.config.heads if grid.heads else 1
    effects = effects.reshape(*effects.shape[:2], num_heads, -1).sum(-1)
    effects = effects[:, list(grid.positions)]
    if grid.heads:
        effects = effects[:, :, list(grid.heads)]
    unswept = tuple(number for number, axis in enumerate(AXES) if axis not in grid.axes)
    return np.asarray(effects.sum(unswept), np.float32)


def ablate(
    lm: Session,
    text: TextLike,
    *,
    metric: Metric | None = None,
    answer: int | str | None = None,
    other: int | str | None = None,
    site: str = "head_out",
    sweep: Sequence[Axis] | None = None,
    layers: Layers = None,
    positions: Positions = None,
    heads: Sequence[int] | None = None,
    reference: Sequence[TextLike] | None = None,
    progress: bool = True,
) -> Sweep:
    """Knock out one part at a time; see `LanguageModel.ablate`."""
    lm.config.require_head()
    tokens, adapter = to_token_ids(lm, text), adapter_name(text)
    grid = _Grid.parse(lm, tokens, site, sweep, layers, positions, heads)
    scored = _make_score(lm, tokens, metric, answer, other)
    means = None if reference is None else _mean_activations(lm, reference, grid)
    (logits,) = run_branches(lm, tokens, [()], scored.num_logits, adapter)
    baseline = scored.measure(to_numpy(logits))

    def removal(layers: tuple[int, ...], span: range, head: int | None) -> Intervention:
        op: Any = Scale(0.0)
        if means is not None:
            values = means[[grid.layers.index(layer) for layer in layers]] if layers else means
            op = MeanAblate(values if head is None else values[..., head, :])
        is_all = len(span) == len(tokens)
        return Intervention(
            grid.site,
            op,
            layers=layers or None,
            positions="all" if is_all else span,
            heads=None if head is None else (head,),
        )

    cells = grid.cells(removal)
    with progress_bar("ablating", len(cells), show=progress) as report:
        values = _run_sweep(lm, tokens, cells, grid.shape, scored, baseline, adapter, report)
    return Sweep(grid.site, scored.label, grid.axes, grid.labels(lm), values, baseline, cells=cells)


def _mean_activations(lm: Session, reference: Sequence[TextLike], grid: _Grid) -> Floats:
    """Mean over all positions of the reference texts."""
    if isinstance(reference, str) or not len(reference):
        raise SettingsError(f"reference must be a list of texts, got {reference!r}")
    total: Any = 0.0
    num_positions = 0
    layers = grid.layers or None
    for cache in activation_caches(lm, reference, sites=grid.site, layers=layers):
        array = cache[grid.site]
        if grid.has_heads and not grid.heads:
            array = array.reshape(*array.shape[:2], -1)
        total = total + array.sum(1 if grid.layers else 0, dtype=np.float64)
        num_positions += len(cache.positions)
    return np.asarray(total / num_positions, np.float32)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Which runs a sweep has: those of the axes that are swept, the others together."""

    site: str
    axes: tuple[str, ...]
    layers: tuple[int, ...]  # empty: the site has no layers
    positions: tuple[int, ...]
    heads: tuple[int, ...]  # empty: heads are not distinguished
    tokens: tuple[int, ...]
    first: int = 0  # positions before are unchanged

    @classmethod
    def parse(
        cls,
        lm: Session,
        tokens: Sequence[int],
        site: str,
        sweep: Sequence[Axis] | None,
        layers: Layers,
        positions: Positions,
        heads: Sequence[int] | None,
    ) -> _Grid:
        name, layer = parse_site(site)
        if name in ("logits", "pattern"):
            raise SettingsError(f"the sites of a sweep are hidden states, got {name}")
        if layer is not None and layers is None:
            layers = layer
        has_layers, has_heads = name in PER_LAYER, name == "head_out"
        if sweep is None:
            swept = ["layer"] if has_layers else []
            swept += ["head"] if has_heads else ["position"]
        else:
            swept = [sweep] if isinstance(sweep, str) else list(sweep)
        possible = [
            axis
            for axis in AXES
            if (axis != "layer" or has_layers) and (axis != "head" or has_heads)
        ]
        if not swept or any(axis not in possible for axis in swept):
            raise SettingsError(f"sweep must be of {', '.join(possible)}, got {sweep!r}")
        if heads is not None and not has_heads:
            raise SettingsError(f"heads are those of head_out, and the site is {name}")
        num_heads = lm.config.heads
        selected = check_layers(num_heads, heads) if heads is not None else range(num_heads)
        return cls(
            name,
            tuple(axis for axis in AXES if axis in swept),
            Reading.parse(lm, name, layers).layers.get(name, ()),
            check_positions(len(tokens), len(tokens), positions),
            tuple(selected) if has_heads and ("head" in swept or heads is not None) else (),
            tuple(tokens),
        )

    def starting_at(self, first: int) -> _Grid:
        return replace(self, first=first)

    @property
    def has_heads(self) -> bool:
        return self.site == "head_out"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(self._values(axis)) for axis in self.axes)

    def _values(self, axis: str) -> tuple[int, ...]:
        return {"layer": self.layers, "position": self.positions, "head": self.heads}[axis]

    def labels(self, lm: Session) -> tuple[tuple[str, ...], ...]:
        texts = lm.readable_all(self.tokens)
        named = {
            "layer": [f"layer {n}" for n in self.layers],
            "position": [f"{n} {texts[n]!r}" if texts[n] else str(n) for n in self.positions],
            "head": [f"head {n}" for n in self.heads],
        }
        return tuple(tuple(named[axis]) for axis in self.axes)

    def cells(
        self, make: Callable[[tuple[int, ...], range, int | None], Intervention]
    ) -> dict[Cell, tuple[Intervention, ...]]:
        """Return the interventions of each cell; cells that change nothing are left out."""
        cells: dict[Cell, tuple[Intervention, ...]] = {}
        for cell in product(*(range(size) for size in self.shape)):
            at = dict(zip(self.axes, cell, strict=True))
            layers, positions = self.layers, self.positions
            heads: Sequence[int | None] = self.heads or (None,)
            if "layer" in at:
                layers = (self.layers[at["layer"]],)
            if "position" in at:
                positions = (self.positions[at["position"]],)
            if "head" in at:
                heads = (self.heads[at["head"]],)
            spans = _spans([position for position in positions if position >= self.first])
            if spans:
                cells[cell] = tuple(make(layers, span, head) for span in spans for head in heads)
        return cells


def _spans(positions: Sequence[int]) -> list[range]:
    """Join ascending positions to ranges."""
    spans: list[range] = []
    for position in positions:
        if spans and spans[-1].stop == position:
            spans[-1] = range(spans[-1].start, position + 1)
        else:
            spans.append(range(position, position + 1))
    return spans
