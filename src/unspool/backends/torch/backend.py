"""The torch backend, the reference for every device: paged KV cache, states, adapters."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from unspool.backends.interventions import SITES
from unspool.backends.step import (
    RECURRENT_STATS,
    BlockTable,
    CompletedStep,
    Floats,
    Ints,
    Observations,
    ObserveRequest,
    StepBatch,
    StepLimits,
    StepResult,
    empty_ints,
    free_memory,
    num_pages_and_states,
)
from unspool.backends.torch.interventions import SiteHooks
from unspool.errors import UnspoolError
from unspool.model.adapters import Adapter
from unspool.model.config import ModelConfig
from unspool.model.files.checkpoint import hash_weights, sample_indices
from unspool.model.hub.memory import kv_budget_with_torch
from unspool.model.layers.recurrent import Mixer, StateObserver
from unspool.model.layers.transformer import (
    QUERY_CHUNK,
    Attention,
    BackendStep,
    Layer,
    Shared,
    SiteHook,
    Transformer,
)
from unspool.sampling.picker import pick_tokens

# -- LoRA adapters on plain torch: rows with different adapters share a step
#
# While a step with adapters runs, each adapted matrix has a forward hook that adds the low-rank
# update of each row's adapter to the product.


class TorchAdapters:
    """The adapters of one backend."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        # By number and matrix: down [columns, rank] and up [rank, rows], which includes the scale.
        self._parts: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}

    def set(self, number: int, adapter: Adapter | None) -> None:
        if adapter is None:
            self._parts.pop(number, None)
            return
        self._parts[number] = {
            name: (
                torch.from_numpy(part.down.T.copy()).to(self._model.get_parameter(name)),
                torch.from_numpy(part.up.T * np.float32(part.scale)).to(
                    self._model.get_parameter(name)
                ),
            )
            for name, part in adapter.parts.items()
        }

    @contextmanager
    def applied(self, batch: StepBatch) -> Iterator[None]:
        """Apply the adapters of a batch to the forward pass of this thread."""
        if not len(batch.adapters):
            yield
            return
        numbers = np.repeat(batch.adapters, np.diff(batch.row_starts))
        output_tokens = np.concatenate((batch.sample_indices, batch.logits_indices))
        layer_rows, head_rows = self._rows(numbers), self._rows(numbers[output_tokens])
        hooks = []
        try:
            for name in {name for number in layer_rows for name in self._parts[number]}:
                parts = {n: self._parts[n][name] for n in layer_rows if name in self._parts[n]}
                module = self._model.get_submodule(name.removesuffix(".weight"))
                rows = head_rows if name == "head.weight" else layer_rows
                # First of the hooks: before a split layer sums its product over the ranks.
                hooks.append(module.register_forward_hook(_add_updates(parts, rows), prepend=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _rows(self, numbers: Ints) -> dict[int, Tensor]:
        """Rows of a product by adapter number."""
        device = self._model.embed.weight.device
        return {
            int(number): torch.from_numpy(np.flatnonzero(numbers == number)).to(device)
            for number in np.unique(numbers)
            if number
        }


def _add_updates(
    parts: dict[int, tuple[Tensor, Tensor]], rows: dict[int, Tensor]
) -> Callable[[nn.Module, Any, Tensor], None]:
    """A forward hook that adds low-rank updates to the given rows of a product."""
    owner = threading.get_ident()  # another thread may use the same weights meanwhile

    def add(module: nn.Module, inputs: tuple[Tensor, ...], product: Tensor) -> None:
        if threading.get_ident() != owner:
            return
        x, out = inputs[0].flatten(0, -2), product.flatten(0, -2)
        for number, (down, up) in parts.items():
            if number in rows:
                indices = rows[number].to(out.device)
                out.index_add_(0, indices, x[indices] @ down @ up)

    return add


# -- Recurrent state slots, read before a row's first token and written after its last


@dataclass(frozen=True, slots=True)
class RecurrentChunk:
    """Tokens that go through the recurrence together: one token each of several rows, or several
    tokens of one row, up to a token whose state is saved."""

    tokens: Tensor  # [rows, tokens]: token indices in the batch
    reads: list[int]  # state slots, -1: a zero state; empty: continues the previous chunk
    writes: list[tuple[int, int]]  # row of the chunk, state slot


def recurrent_chunks(batch: StepBatch, slots: int) -> list[RecurrentChunk]:
    """Divide a step into chunks, the same for all recurrent layers; `slots`: number of slots."""
    rows, captures = len(batch.row_starts) - 1, batch.state_captures
    is_valid = batch.state_slots.shape == (rows, 2) and bool((batch.state_slots >= (-1, 0)).all())
    is_valid = is_valid and bool((batch.state_slots < slots).all() and (captures >= 0).all())
    is_valid = is_valid and bool((captures < (len(batch.tokens), slots)).all())
    if not is_valid or (np.diff(captures[:, 0]) < 0).any():
        raise UnspoolError("the batch names a recurrent state or a token that does not exist")
    capture_slots: dict[int, list[int]] = {}
    for token, slot in captures.tolist():
        capture_slots.setdefault(token, []).append(slot)
    counts = np.diff(batch.row_starts)
    chunks = [_decode_chunk(batch, np.flatnonzero(counts == 1), capture_slots)]
    for row in np.flatnonzero(counts > 1).tolist():
        first, end = batch.row_starts[row : row + 2].tolist()
        first_slot, last_slot = batch.state_slots[row].tolist()
        reads = [first_slot]
        for token in range(first, end):
            writes = capture_slots.get(token, []) + [last_slot] * (token == end - 1)
            if writes:
                tokens = torch.arange(first, token + 1)[None]
                chunks.append(RecurrentChunk(tokens, reads, [(0, slot) for slot in writes]))
                first, reads = token + 1, []
    return [chunk for chunk in chunks if chunk.tokens.numel()]


def _decode_chunk(
    batch: StepBatch, rows: Ints, capture_slots: dict[int, list[int]]
) -> RecurrentChunk:
    """The chunk of all rows with a single token."""
    tokens = batch.row_starts[rows]
    writes = list(enumerate(batch.state_slots[rows, 1].tolist()))
    for row, token in enumerate(tokens.tolist()):
        writes += [(row, slot) for slot in capture_slots.get(token, [])]
    return RecurrentChunk(
        torch.from_numpy(tokens)[:, None], batch.state_slots[rows, 0].tolist(), writes
    )


class StateSlots:
    """The state slots of a backend in float32: [slots, floats] per layer, on the layer's device."""

    def __init__(self, config: ModelConfig, slots: int, devices: list[torch.device]) -> None:
        self._pools = [
            torch.zeros(slots, config.state_floats(layer), device=device)
            for layer, device in enumerate(devices)
        ]

    def mix(
        self,
        layer: int,
        mixer: Mixer,
        x: Tensor,
        chunks: list[RecurrentChunk],
        observer: RecurrentObserver | None,
    ) -> Tensor:
        """Run a recurrent layer on the tokens of all rows, [1, tokens, width]."""
        parts = mixer.project(x)
        pool = self._pools[layer]
        mixed: Tensor | None = None
        state = pool[:0]
        for chunk in chunks:
            if chunk.reads:
                state = pool[[max(0, slot) for slot in chunk.reads]]
                state[[row for row, slot in enumerate(chunk.reads) if slot < 0]] = 0
            record = observer.recorder(layer, chunk.tokens) if observer else None
            inputs = tuple(part[0, chunk.tokens] for part in parts)
            out, state = mixer.recur(inputs, state, record)
            if mixed is None:
                mixed = out.new_empty(x.shape[1], out.shape[-1])
            mixed[chunk.tokens] = out
            rows, slots = zip(*chunk.writes, strict=True)
            pool[list(slots)] = state[list(rows)]
        assert mixed is not None, "the step has no tokens"
        return mixer.finish(mixed[None], parts)


class RecurrentObserver:
    """Gate, decay and state norm of recurrent layers at the observed tokens."""

    def __init__(self, config: ModelConfig, look: ObserveRequest) -> None:
        heads = max(1, config.recurrence.value_heads if config.recurrence else 0)
        shape = (config.layers, RECURRENT_STATS, heads)
        self.stats: dict[int, Floats] = {
            int(token): np.full(shape, np.nan, np.float32) for token in look.attention
        }

    def recorder(self, layer: int, tokens: Tensor) -> StateObserver:
        """A callback that records the tokens of one chunk in one layer."""

        def record(column: int, gate: Tensor, decay: Tensor, norm: Tensor) -> None:
            for row, token in enumerate(tokens[:, column].tolist()):
                if token in self.stats:
                    values = torch.stack((gate[row], decay[row], norm[row])).float().cpu().numpy()
                    self.stats[token][layer, :, : values.shape[1]] = values

        return record


# -- The torch backend: ragged batches over a paged KV cache, on any device

PAGE_SIZE = 16


class TorchBackend:
    """`Backend` on a `Transformer`."""

    limits = StepLimits()
    overlaps = False
    sites = frozenset(SITES)

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
        self.echoes = not self.state_bytes  # recurrent states belong to a single row
        self.page_size, self.page_count = PAGE_SIZE, page_count
        self.page_bytes = page_bytes(model)
        self.vocab_size = config.vocab_size
        self.context = context or config.default_context
        self._devices = layer_devices(model)
        self._table = BlockTable()
        self._states = StateSlots(config, state_count, self._devices)
        self._adapters = TorchAdapters(model)
        self._last_handle_id, self._hooked = -1, False  # cache of `is_hooked`
        # [slots, heads, width] for each layer that stores keys and values: slot = page * page_size
        # + offset in the page.
        self._keys, self._values = (
            {
                layer: _lazy_zeros(
                    (page_count * PAGE_SIZE, *config.kv_shape(layer)),
                    model.embed.weight.dtype,
                    self._devices[layer],
                )
                for layer in config.kv_layers
            }
            for _ in range(2)
        )

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> CompletedStep:
        self._table.apply(batch.table_updates)
        for source, target in batch.page_copies.tolist():
            self._copy_page(source, target)
        with self._adapters.applied(batch):
            return CompletedStep(self._run(batch))

    def set_adapter(self, number: int, adapter: Adapter | None) -> None:
        self._adapters.set(number, adapter)

    def _copy_page(self, source: int, target: int) -> None:
        size = self.page_size
        for store in (*self._keys.values(), *self._values.values()):
            store[target * size : (target + 1) * size] = store[source * size : (source + 1) * size]

    def is_hooked(self) -> bool:
        """Whether a user's forward hook or pre-hook is set on the model, or on all modules.

        Results are then not cached for other requests. Unspool's own hooks do not count.
        """
        handle_id = RemovableHandle.next_id  # every new hook takes a new id
        if handle_id != self._last_handle_id or self._hooked:
            self._last_handle_id = handle_id
            module_hooks = torch.nn.modules.module
            hook_dicts = [
                module_hooks._global_forward_hooks,
                module_hooks._global_forward_pre_hooks,
            ]
            for module in self.model.modules():
                hook_dicts += [module._forward_hooks, module._forward_pre_hooks]
            self._hooked = any(
                not str(getattr(hook, "__module__", "")).startswith("unspool.")
                for hooks in hook_dicts
                for hook in tuple(hooks.values())
            )
        return self._hooked

    def _run(self, batch: StepBatch) -> StepResult:
        run = _StepForward(self, batch)
        tokens = torch.from_numpy(batch.tokens).to(self.model.embed.weight.device)[None]
        # Call modules, not their methods, so that hooks run.
        with run.sites.applied():
            tensor = self.model(tokens, step=run.compute).float()
        logits = tensor if tensor.device.type != "cpu" else tensor.numpy()
        count, inside = len(batch.sample_indices), None
        if run.observer:
            inside = replace(run.observer.inside(), sites=run.sites.values())
        if batch.sampling is None:
            return StepResult(empty_ints(), np.empty(0), logits, inside)
        picks = pick_tokens(logits[:count], batch.sampling)
        return StepResult(
            picks.tokens, picks.logprobs, logits[count:], inside, picks.failures, picks.details
        )


class _StepForward(BackendStep):
    """The forward pass of one batch."""

    def __init__(self, backend: TorchBackend, batch: StepBatch) -> None:
        self._backend, self._batch = backend, batch
        self._indices = {
            device: _BatchIndices(batch, backend._table, backend.page_size, device)
            for device in dict.fromkeys(backend._devices)
        }
        self._current = next(iter(self._indices.values()))  # on the device of the current layer
        self._chunks = recurrent_chunks(batch, backend.state_count) if backend.state_bytes else []
        self._middle: Tensor | None = None  # x after attention in the current layer
        self.sites = SiteHooks(backend.model, batch)
        self.observer: _TorchObserver | None = None

    def compute(self, tokens: Tensor) -> Tensor:
        """Run the model on tokens [1, count]; returns logits at the requested tokens."""
        backend, batch, model = self._backend, self._batch, self._backend.model
        angles = model.rope_tables(batch.positions, backend.context)
        x = self.sites("embedding", 0, model.embed_tokens(tokens, batch.positions))
        token_inputs, shared = model.per_layer_embeddings(tokens, x), Shared()
        x = self.sites.between_layers(0, x)
        observer = _TorchObserver(batch.observe, x, model.config) if batch.observe else None
        self.observer = observer
        for number, layer in enumerate(model.layers):
            assert isinstance(layer, Layer)
            self._current, token = self._indices[backend._devices[number]], token_inputs[number]
            device = self._current.device
            if x.device != device:  # this layer is on another device
                x = x.to(device)
                moved = {angle: angle.to(x) for angle in angles if angle is not None}
                angles = [None if angle is None else moved[angle] for angle in angles]
            token = None if token is None else token.to(device)
            if observer and not layer.mixes:
                observer.skip_attention(self._current.visible_end)
            after = layer(x, angles[number], None, self, shared, token)
            after = self.sites.between_layers(number + 1, after)
            if observer:
                assert self._middle is not None
                middle = self._middle.float()
                observer.record_layer(after, middle - x.float(), after.float() - middle)
            x = after
        outputs = torch.from_numpy(self.sites.outputs).to(x.device)
        x = x[0, outputs].to(model.norm.weight.device)
        if not self.sites:
            return model.logits(x)
        normed = model.norm(x if model.transform is None else model.transform(x))
        logits = model.head_logits(self.sites("final_norm", 0, normed))
        return self.sites("logits", 0, logits)[: self.sites.num_outputs]

    @property
    def hook(self) -> SiteHook | None:
        return self._hook if self.sites or self.observer else None

    def _hook(self, site: str, layer: int, x: Tensor) -> Tensor:
        x = self.sites(site, layer, x)
        if site == "resid_mid":
            self._middle = x
        return x

    def needs_weights(self, layer: int) -> bool:
        """Whether attention weights are changed or observed."""
        return self.observer is not None or self.sites.changes_pattern(layer)

    def take_weights(self, layer: int, token: int, weights: Tensor) -> None:
        """Change a token's attention weights [heads, visible] in place, and observe them."""
        self.sites.change_pattern(layer, token, weights)
        if self.observer:
            self.observer.record_attention(token, weights.clone())

    def recur(self, layer: int, mixer: Mixer, x: Tensor) -> Tensor:
        states = None
        if self.observer:
            self.observer.skip_attention(self._current.visible_end)
            states = self.observer.states
        return self._backend._states.mix(layer, mixer, x, self._chunks, states)

    def __call__(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, source = self._current, attention.source
        keys, values = self._backend._keys[source], self._backend._values[source]
        if attention.has_own_kv:
            slots = batch.slots
            keys[slots], values[slots] = key[0].transpose(0, 1), value[0].transpose(0, 1)
            if batch.echo_tokens is not None:
                keys[batch.echo_slots] = key[0, :, batch.echo_tokens].transpose(0, 1)
                values[batch.echo_slots] = value[0, :, batch.echo_tokens].transpose(0, 1)
        mixed = torch.empty_like(query[0].transpose(0, 1))  # [tokens, heads, head_width]
        for rows in batch.groups:
            rows.attend(attention, query[0], keys, values, mixed, self)
        return mixed.transpose(0, 1)[None]


def layer_devices(model: Transformer) -> list[torch.device]:
    """Device of each layer."""
    return [next(layer.parameters()).device for layer in model.layers]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose memory is committed as it is written (torch.zeros would touch every page)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


def page_bytes(model: Transformer, layers: Iterable[int] | None = None) -> int:
    """Bytes of a KV cache page, in all layers or in the given ones."""
    config = model.config
    kv_layers = config.kv_layers if layers is None else set(config.kv_layers) & set(layers)
    values = sum(2 * config.shape(layer).kv_width for layer in kv_layers)
    return values * PAGE_SIZE * model.embed.weight.element_size()


def cache_size(model: Transformer, memory: int | None) -> tuple[int, int]:
    """Number of pages and of state slots that fit into `memory` bytes. None: on each device with
    layers, half of the free memory of a GPU, or a quarter of it elsewhere (at most 2 GB)."""
    config, devices = model.config, layer_devices(model)
    if memory is not None:
        return num_pages_and_states(memory, page_bytes(model), config.state_bytes)
    all_pages, all_states = [], []
    for device in dict.fromkeys(devices):
        layers = [layer for layer in range(config.layers) if devices[layer] == device]
        page, state = page_bytes(model, layers), 4 * sum(map(config.state_floats, layers))
        pages, states = num_pages_and_states(_cache_memory(device), max(1, page), state)
        all_pages += [pages] if page else []
        all_states += [states] if state else []
    return min(all_pages), min(all_states, default=0)


def _cache_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return kv_budget_with_torch(torch.cuda.mem_get_info(device)[0])
    return min(2 << 30, free_memory() // 4)


class _BatchIndices:
    """Indices of a batch that all layers on a device share, computed once."""

    def __init__(
        self, batch: StepBatch, table: BlockTable, page_size: int, device: torch.device
    ) -> None:
        counts = np.diff(batch.row_starts)
        rows = np.repeat(batch.slots, counts)
        slots = table.pages[rows, batch.positions // page_size] * page_size
        self.device = device
        self.visible_end = batch.visible_end
        self.slots = torch.from_numpy(slots + batch.positions % page_size).to(device)
        self.echo_tokens: Tensor | None = None  # tokens also written to the slots of other rows
        if len(batch.echoes):
            tokens, table_rows = batch.echoes.T
            positions = batch.positions[tokens]
            pages = table.pages[table_rows, positions // page_size]
            self.echo_tokens = torch.from_numpy(tokens.copy()).to(device)
            self.echo_slots = torch.from_numpy(pages * page_size + positions % page_size).to(device)
        single = np.flatnonzero(counts == 1)
        self.groups: list[_DecodeRows | _PrefillRow] = []
        if len(single):
            self.groups.append(_DecodeRows(batch, single, table, page_size, device))
        for row in np.flatnonzero(counts > 1):
            self.groups.append(_PrefillRow(batch, int(row), table, page_size, device))


def _kv_slots(pages: Ints, length: int, page_size: int) -> Ints:
    """Slots of the first `length` tokens of a sequence."""
    used = pages[: -(-length // page_size)]
    slots = used[:, None] * page_size + np.arange(page_size)[None, :]
    return slots.reshape(-1)[:length]


class _DecodeRows:
    """Attention of rows with one new token each: their keys padded to the longest row."""

    def __init__(
        self,
        batch: StepBatch,
        rows: Ints,
        table: BlockTable,
        page_size: int,
        device: torch.device,
    ) -> None:
        tokens = batch.row_starts[rows]
        ends = batch.visible_end[tokens]
        slots = np.zeros((len(rows), int(ends.max())), np.int64)
        for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
            slots[index, :end] = _kv_slots(table.pages[batch.slots[row]], int(end), page_size)
        self.lengths = ends.tolist()
        self.tokens = torch.from_numpy(tokens).to(device)
        self.slots = torch.from_numpy(slots).to(device)
        self.query_positions = torch.from_numpy(batch.positions[tokens]).to(device)[:, None]
        # Padding is at positions from `ends` on, which the mask hides.
        self.ends = torch.from_numpy(ends).to(device)[:, None]
        self.key_positions = torch.arange(slots.shape[1], device=device)

    def attend(
        self,
        attention: Attention,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mixed: Tensor,
        step: _StepForward,
    ) -> None:
        queries = query[:, self.tokens].transpose(0, 1)[:, :, None]  # [rows, heads, 1, head_width]
        key, value = (store[self.slots].transpose(1, 2) for store in (keys, values))
        weights = attention.weights(
            queries, key, self.query_positions, self.key_positions, self.ends
        )
        if step.needs_weights(attention.layer):
            for row, token in enumerate(self.tokens.tolist()):
                step.take_weights(attention.layer, token, weights[row, :, 0, : self.lengths[row]])
        group = weights.shape[1] // value.shape[1]
        grouped = weights.to(value.dtype).unflatten(1, (-1, group))[:, :, :, 0]
        mixed[self.tokens] = (grouped @ value).flatten(1, 2)


class _PrefillRow:
    """Attention of a row with several new tokens: a chunk of a prompt, or a draft to verify."""

    def __init__(
        self,
        batch: StepBatch,
        row: int,
        table: BlockTable,
        page_size: int,
        device: torch.device,
    ) -> None:
        self.first, self.end = int(batch.row_starts[row]), int(batch.row_starts[row + 1])
        self.start = int(batch.positions[self.first])
        self.ends = batch.visible_end[self.first : self.end]
        length = int(self.ends.max())
        slots = _kv_slots(table.pages[batch.slots[row]], length, page_size)
        self.slots = torch.from_numpy(slots).to(device)
        self.positions = torch.arange(length, device=device)

    def attend(
        self,
        attention: Attention,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mixed: Tensor,
        step: _StepForward,
    ) -> None:
        for first in range(self.first, self.end, QUERY_CHUNK):
            end = min(first + QUERY_CHUNK, self.end)
            position = self.start + first - self.first
            ends = self.ends[first - self.first : end - self.first]
            oldest, newest = attention.key_range(position, end - first, int(ends.max()))
            slots, key_positions = self.slots[oldest:newest], self.positions[oldest:newest]
            key, value = (store[slots].transpose(0, 1)[None] for store in (keys, values))
            query_positions = self.positions[position : position + end - first]
            visible_end = torch.from_numpy(ends).to(query_positions.device)
            weights = attention.weights(
                query[None, :, first:end], key, query_positions, key_positions, visible_end
            )
            if step.needs_weights(attention.layer):
                for row, visible in enumerate(ends.tolist()):
                    padded = weights.new_zeros(weights.shape[1], visible)
                    in_window = weights[0, :, row, : visible - oldest]
                    padded[:, oldest : oldest + in_window.shape[1]] = in_window
                    step.take_weights(attention.layer, first + row, padded)
                    in_window[:] = padded[:, oldest : oldest + in_window.shape[1]]
            group = weights.shape[1] // value.shape[1]
            grouped = weights.to(value.dtype).unflatten(1, (-1, group)).flatten(2, 3)
            out = (grouped @ value).unflatten(2, (group, -1)).flatten(1, 2)
            mixed[first:end] = out[0].transpose(0, 1)


class _TorchObserver:
    """Collects observed values while the layers run."""

    def __init__(self, look: ObserveRequest, x: Tensor, config: ModelConfig) -> None:
        self._look = look
        self._heads = config.heads
        self.states = RecurrentObserver(config, look) if config.state_bytes else None
        self._residual_rows = torch.from_numpy(look.residuals)
        self._part_rows = torch.from_numpy(look.parts)
        self._attention_index = {int(token): index for index, token in enumerate(look.attention)}
        self._residuals = [x[0, self._residual_rows]]
        self._parts: list[Tensor] = []
        self._attention: list[list[Tensor]] = [[] for _ in look.attention]

    def record_attention(self, token: int, weights: Tensor) -> None:
        """Record the weights [heads, visible] of a token in the current layer; missing heads of a
        layer with fewer than others are zero."""
        if token in self._attention_index:
            weights = functional.pad(weights, (0, 0, 0, self._heads - len(weights)))
            self._attention[self._attention_index[token]].append(weights)

    def skip_attention(self, visible_end: Ints) -> None:
        """Record zeros for a layer without attention."""
        for token, index in self._attention_index.items():
            zeros = self._residuals[0].new_zeros(self._heads, int(visible_end[token]))
            self._attention[index].append(zeros)

    def record_layer(self, after: Tensor, attended: Tensor, fed: Tensor) -> None:
        """Record a layer's output, and what attention and feed-forward added."""
        if len(self._residual_rows):
            self._residuals.append(after[0, self._residual_rows])
        if len(self._part_rows):
            rows = self._part_rows
            self._parts.append(torch.stack((attended[0, rows], fed[0, rows])))

    def inside(self) -> Observations:
        def host(tensors: list[Tensor]) -> Any:
            return torch.stack([tensor.float().cpu() for tensor in tensors]).numpy()

        return Observations(
            residuals=host(self._look.select_layers(self._residuals))
            if len(self._residual_rows)
            else None,
            attention=[host(layers) for layers in self._attention],
            parts=host(self._parts) if self._parts else None,
            recurrent=list(self.states.stats.values()) if self.states else [],
        )


# -- A torch transformer as a loaded model: it creates backends and returns numpy arrays


class TorchModel:
    """`LoadedModel` for the plain transformer, on any torch device."""

    def __init__(self, transformer: Transformer) -> None:
        self.transformer = transformer

    @property
    def config(self) -> ModelConfig:
        return self.transformer.config

    @property
    def precision(self) -> str:
        return str(self.transformer.embed.weight.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        return str(self.transformer.embed.weight.device)

    @property
    def numerics(self) -> str:
        devices = {weight.device for weight in self.transformer.parameters()}
        return "torch " + ", ".join(sorted(map(device_description, devices)))

    def backend(self, *, memory: int | None, context: int) -> TorchBackend:
        pages, states = cache_size(self.transformer, memory)
        return TorchBackend(self.transformer, page_count=pages, state_count=states, context=context)

    def logits(self, vectors: Floats) -> Floats:
        with torch.inference_mode():
            return to_numpy(self.transformer.logits(self._device_array(vectors)))

    def normed(self, vectors: Floats) -> Floats:
        with torch.inference_mode():
            return to_numpy(self.transformer.norm(self._device_array(vectors)))

    def vector(self, name: str) -> Floats | None:
        norm, head = self.transformer.norm, self.transformer.head
        if name == "norm.weight":
            weight = to_numpy(norm.weight)
            return 1 + weight if norm.plus_one else weight
        head_bias = head.bias if head is not None else self.transformer.head_bias
        bias = {"norm.bias": norm.bias, "head.bias": head_bias}[name]
        return None if bias is None else to_numpy(bias)

    def rows(self, name: str, start: int, stop: int) -> Floats:
        model = self.transformer
        table = model.embed if name != "head.weight" or model.head is None else model.head
        return to_numpy(table.weight[start:stop])

    def fingerprint(self) -> str:
        named = sorted(self.transformer.named_parameters())
        return hash_weights(
            (name, tuple(tensor.shape), _sample_values(tensor)) for name, tensor in named
        )

    def _device_array(self, vectors: Floats) -> Tensor:
        weight = self.transformer.embed.weight
        return torch.from_numpy(np.array(vectors)).to(weight.device, weight.dtype)


def device_description(device: torch.device) -> str:
    """Name of a device's hardware, and the version of torch."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{hardware} torch {torch.__version__}"


def fingerprint_indices(shape: tuple[int, ...]) -> tuple[Ints, ...]:
    """Indices, one array per axis, of the values that a fingerprint includes."""
    return np.unravel_index(sample_indices(shape), shape)


def _sample_values(tensor: Tensor) -> Floats:
    indices = fingerprint_indices(tuple(tensor.shape))
    return to_numpy(tensor.detach()[tuple(torch.from_numpy(axis) for axis in indices)])


def to_numpy(tensor: Tensor) -> Floats:
    return np.asarray(tensor.detach().float().cpu().numpy())
