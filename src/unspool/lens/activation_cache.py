"""Activations of whole texts as named arrays, from the engine that generates.

    cache = activation_cache(lm, "The capital of Italy is", sites=("resid_post", "pattern"))
    cache["resid_post"]                       # [layers, positions, width]
    cache["resid_post", 5]                    # [positions, width]
    cache["blocks.5.hook_resid_post"]         # the same, by the name that TransformerLens uses

Several texts are computed in the same steps. `activation_files.py` writes thousands to disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from unspool.backends.interventions import (
    SITES,
    BranchInterventions,
    Intervention,
    check_layer,
    hook_name,
    parse_hook_name,
    resolve,
    site_layers,
    site_width,
)
from unspool.backends.step import Floats, Observations
from unspool.engine.generation import Generation
from unspool.errors import SettingsError, UnspoolError, check_int, count
from unspool.lens.activations import TextLike, adapter_name, to_numpy, to_token_ids
from unspool.notebook import note_html, notebook_html, table_html
from unspool.session import Session

Names = str | Sequence[str]
Layers = int | Sequence[int] | None
Positions = str | int | slice | Sequence[int] | None

PER_LAYER = frozenset(SITES) - {"embedding", "final_norm", "logits"}
_HEAD_VECTORS = frozenset({"head_out", "q", "k", "v"})  # one vector for each head
_GROUP_TEXTS = 64  # computed in the same steps
_GROUP_BYTES = 256 << 20  # of the activations of texts that are computed together


@dataclass(frozen=True, slots=True, eq=False)
class ActivationCache(Mapping[str, Floats]):
    """Named activations of one text.

    Keys are names of sites. `cache[site]` has an axis for layers, if the site has one, and one for
    positions. `cache[site, layer]`, and a hook name of TransformerLens, give a single layer.
    """

    tokens: tuple[int, ...]  # of the whole text
    texts: tuple[str, ...]  # of each token
    positions: tuple[int, ...]  # the axis of positions
    layers: dict[str, tuple[int, ...]]  # the axis of layers of each site that has them
    arrays: dict[str, Floats]  # by site

    def __getitem__(self, key: str | tuple[str, int]) -> Floats:
        site, layer = key if isinstance(key, tuple) else parse_site(key)
        if site not in self.arrays:
            raise KeyError(f"{key!r}: this cache has {', '.join(self.arrays)}")
        if layer is None:
            return self.arrays[site]
        layers = self.layers.get(site, ())
        if layer not in layers:
            raise KeyError(
                f"{key!r}: this cache has layers {', '.join(map(str, layers)) or 'none'}"
            )
        return np.asarray(self.arrays[site][layers.index(layer)])

    def __contains__(self, key: object) -> bool:
        try:
            self[key]  # type: ignore[index]
        except (KeyError, UnspoolError):
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def hooks(self) -> dict[str, Floats]:
        """Return the same arrays by the hook names of TransformerLens, one for each layer."""
        named: dict[str, Floats] = {}
        for site, array in self.arrays.items():
            if site in self.layers:
                named |= {hook_name(site, n): array[row] for row, n in enumerate(self.layers[site])}
            else:
                named[hook_name(site)] = array
        return named

    def __repr__(self) -> str:
        shapes = ", ".join(f"{site} {list(array.shape)}" for site, array in self.arrays.items())
        return f"<ActivationCache of {count(len(self.tokens), 'token')}: {shapes}>"

    def _repr_html_(self) -> str:
        rows = [(site, str(list(array.shape))) for site, array in self.arrays.items()]
        note = f"{count(len(self.positions), 'position')} of {count(len(self.tokens), 'token')}"
        return notebook_html(note_html(note), table_html(("site", "shape"), rows))


def parse_site(name: str) -> tuple[str, int | None]:
    """Return the site and layer of a name; None: all layers, or a site that has none."""
    if isinstance(name, str) and name in SITES:
        return name, None
    if not isinstance(name, str) or ("hook_" not in name and "." not in name):
        raise SettingsError(f"there is no site {name!r}; sites are {', '.join(SITES)}")
    return parse_hook_name(name)


def check_layers(num_layers: int, layers: Layers) -> tuple[int, ...]:
    """Return layer numbers from 0; None is all of them, and negative ones count from the end."""
    if layers is None:
        return tuple(range(num_layers))
    listed = list(layers) if isinstance(layers, Sequence | np.ndarray) else [layers]
    if not listed:
        raise SettingsError("layers is empty; give at least one, or None for all")
    numbers = [check_int("layers", n, -num_layers, num_layers - 1) % num_layers for n in listed]
    return tuple(dict.fromkeys(numbers))


def check_positions(length: int, prompt_length: int, positions: Positions) -> tuple[int, ...]:
    """Return positions from 0 in ascending order, for a text of this length."""
    if positions is None or positions == "all":
        return tuple(range(length))
    if positions == "last":
        return (length - 1,)
    if positions == "generated":
        return tuple(range(prompt_length, length))
    if isinstance(positions, slice):
        return tuple(range(length))[positions]
    listed = [positions] if isinstance(positions, int) else positions
    if isinstance(listed, str) or not isinstance(listed, Sequence | np.ndarray):
        raise SettingsError(
            "positions must be 'all', 'last', 'generated', an integer, a slice or a list of "
            f"integers, got {positions!r}"
        )
    numbers = [check_int("positions", n, -length, length - 1) % length for n in listed]
    return tuple(sorted(set(numbers)))


@dataclass(frozen=True, slots=True)
class Reading:
    """What to read."""

    sites: tuple[str, ...]
    layers: dict[str, tuple[int, ...]]  # of each site that has layers

    @classmethod
    def parse(cls, lm: Session, sites: Names, layers: Layers = None) -> Reading:
        """Parse names of sites or hooks.

        A hook name says its layer. `layers` is for the names that do not; None: all that have the
        site.
        """
        names = [sites] if isinstance(sites, str) else list(sites)
        if not names:
            raise SettingsError(f"sites is empty; give at least one of {', '.join(SITES)}")
        config = lm.config
        selected: dict[str, set[int] | None] = {}
        for name in names:
            site, layer = parse_site(name)
            if site == "logits":
                config.require_head()
            if site not in PER_LAYER:
                selected[site] = None
                continue
            numbers = {check_layer(config, site, layer)} if layer is not None else None
            if numbers is None:
                numbers = set(site_layers(config, site))
                if not numbers:
                    raise SettingsError(f"no layer of this model has {site}")
                if layers is not None:
                    requested = check_layers(config.layers, layers)
                    numbers = {check_layer(config, site, n) for n in requested}
            selected[site] = (selected.get(site) or set()) | numbers
        return cls(
            tuple(selected),
            {site: tuple(sorted(numbers)) for site, numbers in selected.items() if numbers},
        )

    @property
    def observed(self) -> list[tuple[str, int]]:
        """Sites and layers that the backend observes."""
        return [
            (site, layer)
            for site in self.sites
            if site not in ("logits", "pattern")
            for layer in self.layers.get(site, (0,))
        ]

    def floats_per_token(self, lm: Session, length: int) -> int:
        """Numbers that one position of a text of this length takes, to bound memory."""
        config = lm.config
        total = config.layers * config.heads * length if "pattern" in self.sites else 0
        for site in self.sites:
            if site != "pattern":
                total += sum(site_width(config, site, n) for n in self.layers.get(site, (0,)))
        return total


def activation_cache(
    lm: Session,
    text: TextLike,
    *,
    sites: Names = ("resid_post",),
    layers: Layers = None,
    positions: Positions = None,
    interventions: Sequence[Intervention] = (),
) -> ActivationCache:
    """Read the activations of one text; see `LanguageModel.activations`."""
    return next(
        activation_caches(
            lm,
            [text],
            sites=sites,
            layers=layers,
            positions=positions,
            interventions=interventions,
        )
    )


def activation_caches(
    lm: Session,
    texts: Sequence[TextLike],
    *,
    sites: Names = ("resid_post",),
    layers: Layers = None,
    positions: Positions = None,
    interventions: Sequence[Intervention] = (),
) -> Iterator[ActivationCache]:
    """Read the activations of several texts, in order; texts of a group share their steps.

    All texts are checked before the first is computed.
    """
    reading = Reading.parse(lm, sites, layers)
    lm.check_interventions(interventions)
    jobs: list[_Job] = []
    for number, text in enumerate(texts):
        try:
            jobs.append(_make_job(lm, text, positions, interventions))
        except UnspoolError as error:
            if len(texts) == 1:
                raise
            raise type(error)(f"text {number}: {error}") from None
    return _read_jobs(lm, jobs, reading)


@dataclass(frozen=True, slots=True)
class _Job:
    """A text to read."""

    tokens: list[int]
    positions: tuple[int, ...]
    adapter: str | None
    interventions: BranchInterventions | None


def _make_job(
    lm: Session, text: TextLike, positions: Positions, interventions: Sequence[Intervention]
) -> _Job:
    tokens = to_token_ids(lm, text)
    prompt_length = len(text.prompt) if isinstance(text, Generation) else len(tokens)
    selected = check_positions(len(tokens), prompt_length, positions)
    if not selected:
        raise SettingsError(
            f"positions {positions!r} selects none of the {count(len(tokens), 'token')}"
        )
    carried = text.request.interventions if isinstance(text, Generation) else ()
    resolved = resolve((*carried, *interventions), prompt_length)
    return _Job(tokens, selected, adapter_name(text), resolved)


def _read_jobs(lm: Session, jobs: Sequence[_Job], reading: Reading) -> Iterator[ActivationCache]:
    group: list[_Job] = []
    size = 0
    for job in jobs:
        needed = 4 * reading.floats_per_token(lm, len(job.tokens)) * len(job.positions)
        if group and (size + needed > _GROUP_BYTES or len(group) == _GROUP_TEXTS):
            yield from _read_group(lm, group, reading)
            group, size = [], 0
        group.append(job)
        size += needed
    if group:
        yield from _read_group(lm, group, reading)


def _read_group(lm: Session, jobs: Sequence[_Job], reading: Reading) -> Iterator[ActivationCache]:
    num_logits = [
        len(job.tokens) - job.positions[0] if "logits" in reading.sites else 1 for job in jobs
    ]
    with ExitStack() as stack:
        branches = [
            stack.enter_context(lm.open_branch(job.tokens, job.adapter, job.interventions))
            for job in jobs
        ]
        positions = [frozenset(job.positions) for job in jobs]
        computed = lm.engine.look_all(
            [(branch, ()) for branch in branches],
            at=positions,
            num_logits=num_logits,
            sites=reading.observed,
        )
        patterns: list[list[Floats]] = []
        if "pattern" in reading.sites:  # its rows differ in length
            for branch, at in zip(branches, positions, strict=True):
                inside = lm.engine.look(branch, at=at).inside
                patterns.append([weights for chunk in inside for weights in chunk.attention])
    for number, (job, result) in enumerate(zip(jobs, computed, strict=True)):
        arrays: dict[str, Floats] = {}
        for site in reading.sites:
            if site == "pattern":
                arrays[site] = _pattern(reading.layers[site], job, patterns[number])
            elif site == "logits":
                rows = np.array(job.positions) - job.positions[0]
                arrays[site] = to_numpy(result.logits)[rows]
            else:
                arrays[site] = _join_chunks(lm, reading, site, result.inside)
        yield ActivationCache(
            tokens=tuple(job.tokens),
            texts=tuple(lm.readable_all(job.tokens)),
            positions=job.positions,
            layers=reading.layers,
            arrays=arrays,
        )


def _join_chunks(
    lm: Session, reading: Reading, site: str, chunks: Sequence[Observations]
) -> Floats:
    """Join the chunks of a text: [layers, positions, width], or [positions, width]."""
    by_layer = [
        np.concatenate([chunk.sites[site, layer] for chunk in chunks])
        for layer in reading.layers.get(site, (0,))
    ]
    if site not in reading.layers:
        return by_layer[0]
    array = np.stack(by_layer)
    if site in _HEAD_VECTORS:
        width = lm.config.shape(reading.layers[site][0]).head_width
        return array.reshape(*array.shape[:2], -1, width)
    return array


def _pattern(layers: Sequence[int], job: _Job, rows: Sequence[Floats]) -> Floats:
    """Attention weights [layers, heads, positions, past]; zeros after the position."""
    num_heads, past = rows[0].shape[1], job.positions[-1] + 1
    pattern = np.zeros((len(layers), num_heads, len(rows), past), np.float32)
    for row, weights in enumerate(rows):
        pattern[:, :, row, : weights.shape[-1]] = weights[list(layers)]
    return pattern
