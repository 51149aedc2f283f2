"""The torch backend: ragged batches over paged keys and values, on any device.

The weights and the arithmetic are the plain transformer's. What differs is where keys and values
lie (in pages that texts share) and that many texts are read at once: all tokens of a batch go
through the matrices together, and only attention looks at each text's own past.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from unspool.backends.base import StepLimits
from unspool.backends.memory import free_memory, pages_and_states
from unspool.backends.step import (
    BlockTable,
    Done,
    Inside,
    Ints,
    Look,
    StepBatch,
    StepResult,
    no_ints,
)
from unspool.backends.torch.adapters import TorchAdapters
from unspool.backends.torch.states import StateLook, States, pieces_of
from unspool.model.adapters import Adapter
from unspool.model.config import ModelConfig
from unspool.model.layers.mixers import Mixer
from unspool.model.memory import share_beside_torch
from unspool.model.transformer import (
    QUERIES_AT_ONCE,
    Attention,
    Layer,
    Shared,
    StepRun,
    Transformer,
)
from unspool.sampling.picker import pick

PAGE_SIZE = 16


class TorchBackend:
    """A `Transformer` behind the engine's contract."""

    limits = StepLimits()
    overlaps = False

    def __init__(
        self,
        model: Transformer,
        *,
        page_count: int,
        state_count: int = 0,
        context: int | None = None,
    ) -> None:
        config = model.config
        self.model = model
        self.state_bytes, self.state_count = config.state_bytes, state_count
        self.echoes = not self.state_bytes  # a token's state is that of its own row
        self.page_size, self.page_count = PAGE_SIZE, page_count
        self.page_bytes = page_bytes(model)
        self.vocab_size = config.vocab_size
        self.context = context or config.default_context
        self._devices = layer_devices(model)
        self._table = BlockTable()
        self._states = States(config, state_count, self._devices)
        self._adapters = TorchAdapters(model)
        self._handles, self._hooked = -1, False  # what `is_hooked` knows
        # One long row of slots for each layer that keeps keys and values: slot = page * page_size
        # + place in the page.
        self._keys, self._values = (
            {
                layer: _untouched(
                    (page_count * PAGE_SIZE, *config.kv_shape(layer)),
                    model.embed.weight.dtype,
                    self._devices[layer],
                )
                for layer in config.kv_layers
            }
            for _ in range(2)
        )

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> Done:
        self._table.apply(batch.updates)
        for source, target in batch.copies.tolist():
            self._copy_page(source, target)
        with self._adapters.applied(batch):
            return Done(self._run(batch))

    def set_adapter(self, number: int, adapter: Adapter | None) -> None:
        self._adapters.set(number, adapter)

    def _copy_page(self, source: int, target: int) -> None:
        size = self.page_size
        for store in (*self._keys.values(), *self._values.values()):
            store[target * size : (target + 1) * size] = store[source * size : (source + 1) * size]

    def is_hooked(self) -> bool:
        """Whether a forward hook or pre-hook is set on a module of the model, or on all modules.

        What is computed then is of use to nobody else. Hooks of our own are part of the model.
        """
        created = RemovableHandle.next_id  # no hook can be set without a new one
        if created != self._handles or self._hooked:
            self._handles = created
            every = torch.nn.modules.module
            found = [every._global_forward_hooks, every._global_forward_pre_hooks]
            for module in self.model.modules():
                found += [module._forward_hooks, module._forward_pre_hooks]
            self._hooked = any(
                not str(getattr(hook, "__module__", "")).startswith("unspool.")
                for hooks in found
                for hook in tuple(hooks.values())
            )
        return self._hooked

    def _run(self, batch: StepBatch) -> StepResult:
        run = _Step(self, batch)
        tokens = torch.from_numpy(batch.tokens).to(self.model.embed.weight.device)[None]
        # Called as modules, so that hooks on them fire.
        given = self.model(tokens, step=run.compute).float()
        logits = given if given.device.type != "cpu" else given.numpy()
        picked, inside = len(batch.sampled), run.watch.inside() if run.watch else None
        if batch.pick is None:
            return StepResult(no_ints(), np.empty(0), logits, inside)
        found = pick(logits[:picked], batch.pick)
        return StepResult(found.tokens, found.logprobs, logits[picked:], inside, found.failures)


class _Step(StepRun):
    """One batch on its way through the layers."""

    def __init__(self, backend: TorchBackend, batch: StepBatch) -> None:
        self._backend, self._batch = backend, batch
        self._plans = {
            device: _Plan(batch, backend._table, backend.page_size, device)
            for device in dict.fromkeys(backend._devices)
        }
        self._plan = next(iter(self._plans.values()))  # of the layer at hand
        self._pieces = pieces_of(batch, backend.state_count) if backend.state_bytes else []
        self._between: Tensor | None = None
        self.watch: _Watch | None = None

    def compute(self, tokens: Tensor) -> Tensor:
        """Logits of the tokens [1, count] of which they are wanted."""
        backend, batch, model = self._backend, self._batch, self._backend.model
        angles = model.angles(batch.positions, backend.context)
        x = model.embedded(tokens, batch.positions)
        watch = self.watch = _Watch(batch.look, x, model.config) if batch.look else None
        told, shared = model.told(tokens, x), Shared()
        for number, layer in enumerate(model.layers):
            assert isinstance(layer, Layer)
            self._plan, token = self._plans[backend._devices[number]], told[number]
            device = self._plan.device
            if x.device != device:  # the layers from here on lie elsewhere
                x = x.to(device)
                moved = {one: one.to(x) for one in angles if one is not None}
                angles = [None if one is None else moved[one] for one in angles]
            token = None if token is None else token.to(device)
            if watch and not layer.mixes:
                watch.states(self._plan.ends)
            after = layer(x, angles[number], None, self, shared, token)
            if watch:
                assert self._between is not None
                between = self._between.float()
                watch.layer(after, between - x.float(), after.float() - between)
            x = after
        wanted = torch.from_numpy(np.concatenate((batch.sampled, batch.logits))).to(x.device)
        return model.logits(x[0, wanted].to(model.norm.weight.device))

    def note_attended(self, x: Tensor) -> None:
        self._between = x

    def recur(self, layer: int, mixer: Mixer, x: Tensor) -> Tensor:
        look = self.watch.states(self._plan.ends) if self.watch else None
        return self._backend._states.mix(layer, mixer, x, self._pieces, look)

    def __call__(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        plan, source = self._plan, attention.source
        keys, values = self._backend._keys[source], self._backend._values[source]
        if attention.own:
            keys[plan.slots], values[plan.slots] = key[0].transpose(0, 1), value[0].transpose(0, 1)
            if plan.echoed is not None:
                keys[plan.echo_slots] = key[0, :, plan.echoed].transpose(0, 1)
                values[plan.echo_slots] = value[0, :, plan.echoed].transpose(0, 1)
        mixed = torch.empty_like(query[0].transpose(0, 1))  # [tokens, heads, head_width]
        for rows in plan.groups:
            rows.attend(attention, query[0], keys, values, mixed, self.watch)
        return mixed.transpose(0, 1)[None]


def layer_devices(model: Transformer) -> list[torch.device]:
    """Where each layer lies: mostly all in one place."""
    return [next(layer.parameters()).device for layer in model.layers]


def _untouched(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no memory before they are written: torch.zeros would touch every page."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    room = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(room).view(dtype).view(shape)


def page_bytes(model: Transformer, layers: Iterable[int] | None = None) -> int:
    """Of all layers, or of some."""
    config = model.config
    chosen = config.kv_layers if layers is None else set(config.kv_layers) & set(layers)
    numbers = sum(2 * config.shape(layer).kv_width for layer in chosen)
    return numbers * PAGE_SIZE * model.embed.weight.element_size()


def room_for(model: Transformer, memory: int | None) -> tuple[int, int]:
    """How many pages and states fit the memory given; or, on each device that has layers, half of
    what is free on a GPU, a quarter elsewhere (2 GB at the most)."""
    config, devices = model.config, layer_devices(model)
    if memory is not None:
        return pages_and_states(memory, page_bytes(model), config.state_bytes)
    all_pages, all_states = [], []
    for device in dict.fromkeys(devices):
        here = [layer for layer in range(config.layers) if devices[layer] == device]
        page, state = page_bytes(model, here), 4 * sum(map(config.state_floats, here))
        pages, states = pages_and_states(_free(device), max(1, page), state)
        all_pages += [pages] if page else []
        all_states += [states] if state else []
    return min(all_pages), min(all_states, default=0)


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return share_beside_torch(torch.cuda.mem_get_info(device)[0])
    return min(2 << 30, free_memory() // 4)


class _Plan:
    """What every layer on a device needs to know of a batch, worked out once."""

    def __init__(
        self, batch: StepBatch, table: BlockTable, page_size: int, device: torch.device
    ) -> None:
        counts = np.diff(batch.starts)
        rows = np.repeat(batch.slots, counts)
        slots = table.pages[rows, batch.positions // page_size] * page_size
        self.device = device
        self.ends = batch.visible_end
        self.slots = torch.from_numpy(slots + batch.positions % page_size).to(device)
        self.echoed: Tensor | None = None  # tokens that are written to other rows' slots too
        if len(batch.echoes):
            tokens, lines = batch.echoes.T
            places = batch.positions[tokens]
            slots = table.pages[lines, places // page_size] * page_size + places % page_size
            self.echoed = torch.from_numpy(tokens.copy()).to(device)
            self.echo_slots = torch.from_numpy(slots).to(device)
        single = np.flatnonzero(counts == 1)
        self.groups: list[_Decoding | _Chunk] = []
        if len(single):
            self.groups.append(_Decoding(batch, single, table, page_size, device))
        for row in np.flatnonzero(counts > 1):
            self.groups.append(_Chunk(batch, int(row), table, page_size, device))


def _slots_of(pages: Ints, length: int, page_size: int) -> Ints:
    """The slots of a text's first `length` tokens."""
    used = pages[: -(-length // page_size)]
    every = used[:, None] * page_size + np.arange(page_size)[None, :]
    return every.reshape(-1)[:length]


class _Decoding:
    """Rows with one new token each: their pasts side by side, filled up to the longest."""

    def __init__(
        self,
        batch: StepBatch,
        rows: Ints,
        table: BlockTable,
        page_size: int,
        device: torch.device,
    ) -> None:
        places = batch.starts[rows]
        ends = batch.visible_end[places]
        slots = np.zeros((len(rows), int(ends.max())), np.int64)
        for number, (row, end) in enumerate(zip(rows, ends, strict=True)):
            slots[number, :end] = _slots_of(table.pages[batch.slots[row]], int(end), page_size)
        self.lengths = ends.tolist()
        self.places = torch.from_numpy(places).to(device)
        self.slots = torch.from_numpy(slots).to(device)
        self.ours = torch.from_numpy(batch.positions[places]).to(device)[:, None]
        # What fills a row up stands behind what its query sees, so that the mask hides it.
        self.ends = torch.from_numpy(ends).to(device)[:, None]
        self.theirs = torch.arange(slots.shape[1], device=device)

    def attend(
        self,
        attention: Attention,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mixed: Tensor,
        watch: _Watch | None,
    ) -> None:
        ours = query[:, self.places].transpose(0, 1)[:, :, None]  # [rows, heads, 1, head_width]
        key, value = (store[self.slots].transpose(1, 2) for store in (keys, values))
        weights = attention.weights(ours, key, self.ours, self.theirs, self.ends)
        if watch:
            for number, place in enumerate(self.places.tolist()):
                watch.attention(place, weights[number, :, 0, : self.lengths[number]])
        group = weights.shape[1] // value.shape[1]
        grouped = weights.to(value.dtype).unflatten(1, (-1, group))[:, :, :, 0]
        mixed[self.places] = (grouped @ value).flatten(1, 2)


class _Chunk:
    """A row with several new tokens: a piece of a prompt, or a draft to be checked."""

    def __init__(
        self,
        batch: StepBatch,
        row: int,
        table: BlockTable,
        page_size: int,
        device: torch.device,
    ) -> None:
        self.first, self.end = int(batch.starts[row]), int(batch.starts[row + 1])
        self.start = int(batch.positions[self.first])
        self.ends = batch.visible_end[self.first : self.end]
        length = int(self.ends.max())
        slots = _slots_of(table.pages[batch.slots[row]], length, page_size)
        self.slots = torch.from_numpy(slots).to(device)
        self.positions = torch.arange(length, device=device)

    def attend(
        self,
        attention: Attention,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mixed: Tensor,
        watch: _Watch | None,
    ) -> None:
        for first in range(self.first, self.end, QUERIES_AT_ONCE):
            end = min(first + QUERIES_AT_ONCE, self.end)
            position = self.start + first - self.first
            ends = self.ends[first - self.first : end - self.first]
            oldest, newest = attention.reach(position, end - first, int(ends.max()))
            slots, theirs = self.slots[oldest:newest], self.positions[oldest:newest]
            key, value = (store[slots].transpose(0, 1)[None] for store in (keys, values))
            ours = self.positions[position : position + end - first]
            visible_end = torch.from_numpy(ends).to(ours.device)
            weights = attention.weights(query[None, :, first:end], key, ours, theirs, visible_end)
            if watch:
                for number, past in enumerate(ends.tolist()):
                    whole = weights.new_zeros(weights.shape[1], past)
                    seen = weights[0, :, number, : past - oldest]
                    whole[:, oldest : oldest + seen.shape[1]] = seen
                    watch.attention(first + number, whole)
            group = weights.shape[1] // value.shape[1]
            grouped = weights.to(value.dtype).unflatten(1, (-1, group)).flatten(2, 3)
            found = (grouped @ value).unflatten(2, (group, -1)).flatten(1, 2)
            mixed[first:end] = found[0].transpose(0, 1)


class _Watch:
    """Keeps what the taps asked for while the layers run."""

    def __init__(self, taps: Look, x: Tensor, config: ModelConfig) -> None:
        self._heads = config.heads
        self._states = StateLook(config, taps) if config.state_bytes else None
        self._residual_rows = torch.from_numpy(taps.residuals)
        self._part_rows = torch.from_numpy(taps.parts)
        self._attention_rows = {int(token): number for number, token in enumerate(taps.attention)}
        self._taps = taps
        self._residuals = [x[0, self._residual_rows]]
        self._parts: list[Tensor] = []
        self._attention: list[list[Tensor]] = [[] for _ in taps.attention]

    def attention(self, place: int, weights: Tensor) -> None:
        """The weights of one token in the layer at hand, [heads, past]; what a layer with fewer
        heads than others lacks is zero."""
        if place in self._attention_rows:
            weights = functional.pad(weights, (0, 0, 0, self._heads - len(weights)))
            self._attention[self._attention_rows[place]].append(weights)

    def states(self, ends: Ints) -> StateLook | None:
        """For a layer that has no attention, but perhaps a recurrence."""
        for place, number in self._attention_rows.items():
            none = self._residuals[0].new_zeros(self._heads, int(ends[place]))
            self._attention[number].append(none)
        return self._states

    def layer(self, after: Tensor, attended: Tensor, fed: Tensor) -> None:
        if len(self._residual_rows):
            self._residuals.append(after[0, self._residual_rows])
        if len(self._part_rows):
            rows = self._part_rows
            self._parts.append(torch.stack((attended[0, rows], fed[0, rows])))

    def inside(self) -> Inside:
        def host(tensors: list[Tensor]) -> Any:
            return torch.stack([tensor.float().cpu() for tensor in tensors]).numpy()

        return Inside(
            residuals=host(self._taps.chosen(self._residuals))
            if len(self._residual_rows)
            else None,
            attention=[host(layers) for layers in self._attention],
            parts=host(self._parts) if self._parts else None,
            recurrent=list(self._states.seen.values()) if self._states else [],
        )
