"""The native backend: a whole step in one call of the compiled library.

KV cache pages hold sixteen tokens, with 8, 16 or 32 bits per value. Their memory is reserved when
the backend is created, but the system provides it only as pages are written.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from unspool.backends.cpu.interventions import CpuInterventions
from unspool.backends.cpu.packing import LANES
from unspool.backends.cpu.structures import (
    LOW_RANK,
    AdaptersStruct,
    BatchStruct,
    KvCacheStruct,
    LayerPagesStruct,
    RopeTableStruct,
    TapsStruct,
    address_of,
    contiguous,
    native_functions,
)
from unspool.backends.cpu.threads import FORKED
from unspool.backends.interventions import NATIVE_SITES, OUTPUT_SITES, site_width
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
from unspool.errors import UnspoolError
from unspool.model.config import ModelConfig
from unspool.sampling.picker import pick_tokens

if TYPE_CHECKING:
    from unspool.backends.cpu.plan import ExecutionPlan
    from unspool.backends.cpu.program import CompiledPlan
    from unspool.model.adapters import Adapter


# -- LoRA adapters: matrices in the kernels' layout, and the adapter of each row


@dataclass(slots=True)
class RowAdapters:
    """Adapters of a step's rows for the library, and the memory that the struct points at."""

    struct: AdaptersStruct
    row_adapters: Ints


class CpuAdapters:
    """The adapters of one backend: a table [adapters, matrices of the plan] of low-rank updates."""

    def __init__(self, plan: ExecutionPlan) -> None:
        _, self._names = plan.encode()
        # Matrices of one operation are multiplied together, and so are their updates.
        counts = [len(operation.matrices) for operation in plan.operations]
        self._starts = [0, *itertools.accumulate(counts)]
        self._arrays: dict[int, list[Floats]] = {}  # memory that the lines point at, by adapter
        self._lines: dict[int, npt.NDArray[np.void]] = {}
        self._table = np.empty((0, len(self._names)), LOW_RANK)
        self._numbers: Ints = np.empty(0, np.int64)  # adapter number of each line
        self._max_rank = 1

    def set(self, number: int, adapter: Adapter | None) -> None:
        """Register an adapter under a number; None removes it."""
        if adapter is None:
            self._lines.pop(number, None)
            self._arrays.pop(number, None)
        else:
            self._lines[number], self._arrays[number] = self._pack(adapter)
        self._numbers = np.array(list(self._lines), np.int64)
        self._table = np.stack(list(self._lines.values())) if self._lines else self._table[:0]
        rank_sums = [
            self._table["rank"][:, start:end].sum(1).max(initial=1)
            for start, end in itertools.pairwise(self._starts)
        ]
        self._max_rank = int(max(rank_sums))

    def _pack(self, adapter: Adapter) -> tuple[npt.NDArray[np.void], list[Floats]]:
        unknown = adapter.parts.keys() - set(self._names)
        if unknown:
            raise UnspoolError(f"the native backend cannot adapt {min(unknown)}")
        line, arrays = np.zeros(len(self._names), LOW_RANK), list[Floats]()
        for index, name in enumerate(self._names):
            part = adapter.parts.get(name)
            if part is None:
                continue
            blocks = -(-len(part.up) // LANES)
            padded = np.zeros((blocks * LANES, part.rank), np.float32)
            padded[: len(part.up)] = part.up * np.float32(part.scale)
            up = np.ascontiguousarray(padded.reshape(blocks, LANES, -1).transpose(0, 2, 1))
            down = np.ascontiguousarray(part.down, np.float32)
            line[index] = (address_of(down), address_of(up), part.rank)
            arrays += [down, up]
        return line, arrays

    def for_batch(self, batch: StepBatch) -> RowAdapters:
        """The adapters of a step's rows."""
        matches = batch.adapters[:, None] == self._numbers[None, :]
        lines = np.where(matches.any(1), matches.argmax(1), -1)
        if ((lines < 0) & (batch.adapters != 0)).any():
            raise UnspoolError("the step names an adapter that is not loaded")
        row_adapters = np.ascontiguousarray(lines, np.int64)
        struct = AdaptersStruct(
            address_of(row_adapters), address_of(self._table), len(self._table), self._max_rank
        )
        return RowAdapters(struct, row_adapters)


# -- Observation of recurrent layers

_COLUMNS = 2 * LANES  # columns of a head's state per task: kColumns in `native/kernels`


class RecurrentObserver:
    """Buffer for the partial sums of the kernels, and their reduction to gate, decay and norm."""

    def __init__(self, config: ModelConfig, look: ObserveRequest, count: int) -> None:
        shape = config.recurrence
        assert shape is not None
        self._config, self._heads = config, max(1, shape.value_heads)
        self._blocks = -(-shape.value_width // _COLUMNS)
        channels = -(-config.width // LANES)
        stride = max(2 * channels, self._heads * (2 + self._blocks))
        self._sums = np.zeros((len(look.attention), config.layers, stride), np.float32)
        self._offsets = np.full(count, -1, np.int64)
        self._offsets[look.attention] = np.arange(len(look.attention)) * config.layers * stride

    def set_taps(self, taps: TapsStruct) -> None:
        taps.recurrent_offsets, taps.recurrent_stats = (
            address_of(self._offsets),
            address_of(self._sums),
        )
        taps.recurrent_stride = self._sums.shape[2]

    def stats(self) -> list[Floats]:
        """One array per token: [layers, 3, heads]; NaN in layers without a recurrence."""
        count, config = len(self._sums), self._config
        if not count:
            return []
        stats = np.full((count, config.layers, RECURRENT_STATS, self._heads), np.nan, np.float32)
        for layer in range(config.layers):
            sums = self._sums[:, layer]
            if config.mixer(layer) == "conv":
                pairs = sums[:, : 2 * -(-config.width // LANES)].reshape(count, -1, 2).sum(1)
                stats[:, layer, 0, 0] = np.sqrt(pairs[:, 0] / config.width)
                stats[:, layer, 1:, 0] = 0.0
                stats[:, layer, 2, 0] = np.sqrt(pairs[:, 1])
            elif config.mixer(layer) in ("delta", "mamba2"):
                heads = sums[:, : self._heads * (2 + self._blocks)]
                heads = heads.reshape(count, self._heads, -1)
                stats[:, layer, :2] = heads[:, :, :2].transpose(0, 2, 1)
                stats[:, layer, 2] = np.sqrt(heads[:, :, 2:].sum(-1))
        return list(stats)


PAGE_SIZE = 16
_NO_LOGPROBS = np.empty(0)
_MIN_ROPE_POSITIONS = 512  # first size of the RoPE tables; they grow by doubling
_ERRORS = {  # by status of the library
    1: "not enough memory for a batch of {count} tokens; use smaller batches",
    2: "no thread could be started; use fewer with threads=1",
    3: "the batch names a token, a position, a page or a state that does not exist",
}


def page_layout(config: ModelConfig, kv_bits: int) -> tuple[Any, int]:
    """Offsets of each layer's keys and values in a page of sixteen tokens, and the page's bytes.

    A layer that shares the KV cache of another has its offset; a layer without one has 0 heads.
    """
    layers, size = (LayerPagesStruct * config.layers)(), 0
    for layer in config.kv_layers:
        heads, width = config.kv_shape(layer)
        layers[layer] = LayerPagesStruct(size, heads, width)
        padded_width = -(-width // LANES) * LANES
        scales = 4 * PAGE_SIZE if kv_bits == 8 else 0
        size += 2 * heads * (PAGE_SIZE * padded_width * kv_bits // 8 + scales)
    for layer in range(config.layers):
        layers[layer] = layers[config.kv_source(layer)]
    return layers, size


class PlannedModel(Protocol):
    """A loaded model as the backend needs it (`CpuModel`, which imports this module)."""

    kv_bits: int
    threads: int

    @property
    def config(self) -> ModelConfig: ...

    @property
    def plan(self) -> ExecutionPlan: ...

    def new_runner(self) -> CompiledPlan: ...


class CpuBackend:
    """`Backend` on the native library."""

    limits = StepLimits()
    overlaps = False
    sites = NATIVE_SITES

    def __init__(self, model: PlannedModel, *, memory: int | None, context: int) -> None:
        config = model.config
        self.model = model
        self.page_size = PAGE_SIZE
        layers, self.page_bytes = page_layout(config, model.kv_bits)
        if memory is None:
            memory = min(2 << 30, free_memory() // 4)
        self.state_bytes = config.state_bytes
        self.echoes = not self.state_bytes  # recurrent states belong to a single row
        self.page_count, self.state_count = num_pages_and_states(
            memory, self.page_bytes, self.state_bytes
        )
        self.vocab_size = config.vocab_size
        self.context = context
        self._memory = _reserve_zeros(self.page_count * self.page_bytes)
        self._states = _reserve_zeros(max(1, self.state_count * self.state_bytes))
        self._kv_cache = KvCacheStruct(
            data=address_of(self._memory),
            pages=self.page_count,
            page_bytes=self.page_bytes,
            layers=layers,
            bits=model.kv_bits,
        )
        self._runner = model.new_runner()
        self._rope_tables = _RopeTables(model, context)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._table = BlockTable()
        self._adapters = CpuAdapters(model.plan)
        self._interventions = CpuInterventions(model.plan)
        self._logits = np.empty((0, self.vocab_size), np.float32)

    def launch(self, batch: StepBatch) -> CompletedStep:
        """Run the whole step in one call of the library, and sample in another. Thread-safe."""
        if os.getpid() != self._process:
            raise UnspoolError(FORKED)
        with self._lock:
            self._table.apply(batch.table_updates)
            for source, target in batch.page_copies.tolist():
                self._copy_page(source, target)
            return CompletedStep(self._run(batch))

    def set_adapter(self, number: int, adapter: Adapter | None) -> None:
        with self._lock:
            self._adapters.set(number, adapter)

    def read_pages(self, pages: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the content of pages, [n, page_bytes]."""
        with self._lock:
            return self._page_rows()[list(pages)]

    def write_pages(self, pages: Sequence[int], content: npt.NDArray[np.uint8]) -> None:
        with self._lock:
            self._page_rows()[list(pages)] = content

    def read_state(self, slot: int) -> npt.NDArray[np.uint8]:
        """Return a copy of a recurrent state."""
        with self._lock:
            content: npt.NDArray[np.uint8] = self._state_rows()[slot].copy()
            return content

    def write_state(self, slot: int, content: npt.NDArray[np.uint8]) -> None:
        with self._lock:
            self._state_rows()[slot] = content

    def _page_rows(self) -> npt.NDArray[np.uint8]:
        size = self.page_count * self.page_bytes
        return self._memory[:size].reshape(self.page_count, self.page_bytes)

    def _state_rows(self) -> npt.NDArray[np.uint8]:
        size = self.state_count * self.state_bytes
        return self._states[:size].reshape(self.state_count, self.state_bytes)

    def _copy_page(self, source: int, target: int) -> None:
        if not (0 <= source < self.page_count and 0 <= target < self.page_count):
            raise UnspoolError(
                f"pages must be within 0 to {self.page_count - 1}, got {source} and {target}"
            )
        native_functions().unspool_copy_page(ctypes.byref(self._kv_cache), source, target)

    def _run(self, batch: StepBatch) -> StepResult:
        num_sampled, num_logits = len(batch.sample_indices), len(batch.logits_indices)
        output_tokens = (
            np.concatenate((batch.sample_indices, batch.logits_indices))
            if num_logits
            else batch.sample_indices
        )
        look = batch.observe
        num_read = len(look.tokens) if look is not None and look.reads_outputs else 0
        if look is not None and num_read:
            output_tokens = np.concatenate((output_tokens, look.tokens))
        arrays = [
            contiguous(array)
            for array in (
                batch.tokens, batch.positions, batch.visible_end, batch.row_starts, batch.slots,
                self._table.pages, output_tokens,
            )
        ]  # fmt: skip
        count, rows = len(batch.tokens), len(batch.row_starts) - 1
        if {len(batch.positions), len(batch.visible_end)} != {count} or len(batch.slots) != rows:
            raise UnspoolError(_ERRORS[3])
        structure = BatchStruct(
            *map(address_of, arrays), count, rows, *self._table.pages.shape, len(output_tokens)
        )
        adapters = self._adapters.for_batch(batch) if len(batch.adapters) else None
        structure.adapters = ctypes.addressof(adapters.struct) if adapters else None
        if len(batch.echoes):
            echo_slots = contiguous(batch.echoes[:, 1])
            starts = contiguous(np.searchsorted(batch.echoes[:, 0], np.arange(count + 1)))
            structure.echo_starts, structure.echo_slots = address_of(starts), address_of(echo_slots)
        state_arrays = self._set_states(structure, batch) if self.state_bytes else ()
        changes = None
        if batch.interventions is not None:
            changes = self._interventions.for_step(batch.interventions, count)
            structure.changes = ctypes.addressof(changes.struct)
        logits = self._logits_buffer(num_sampled, num_logits + num_read)
        observer = _CpuObserver(self.model, batch, look, num_read) if look else None
        status = native_functions().unspool_run(
            self._runner.handle,
            ctypes.addressof(self._kv_cache),
            self._rope_tables.address_for(int(arrays[1].max()) + 1 if count else 0),
            ctypes.addressof(structure),
            ctypes.addressof(observer.taps) if observer else None,
            address_of(logits),
        )
        del state_arrays, changes
        logits = logits[: num_sampled + num_logits]
        if status:
            raise UnspoolError(_ERRORS[status].format(count=count))
        inside = observer.inside() if observer else None
        if batch.sampling is None:
            return StepResult(empty_ints(), _NO_LOGPROBS, logits[num_sampled:], inside)
        picks = pick_tokens(logits[:num_sampled], batch.sampling, self.model.threads)
        return StepResult(
            picks.tokens, picks.logprobs, logits[num_sampled:], inside, picks.failures,
            picks.details,
        )  # fmt: skip

    def _set_states(self, structure: BatchStruct, batch: StepBatch) -> tuple[Ints, ...]:
        """Set the recurrent state slots of `structure`; returns arrays that must outlive it."""
        rows, count = len(batch.row_starts) - 1, len(batch.tokens)
        tokens = batch.state_captures[:, 0]
        in_range = len(tokens) == 0 or (tokens[0] >= 0 and tokens[-1] < count)
        if batch.state_slots.shape != (rows, 2) or not in_range or (np.diff(tokens) < 0).any():
            raise UnspoolError(_ERRORS[3])
        states = contiguous(batch.state_slots)
        structure.state_data, structure.state_slots = address_of(self._states), self.state_count
        structure.state_floats, structure.states = self.state_bytes // 4, address_of(states)
        if not len(tokens):
            return (states,)
        slots = contiguous(batch.state_captures[:, 1])
        starts = contiguous(np.searchsorted(tokens, np.arange(count + 1)))
        structure.capture_starts, structure.capture_slots = address_of(starts), address_of(slots)
        return states, slots, starts

    def _logits_buffer(self, num_sampled: int, num_logits: int) -> Floats:
        """Memory for logits: new if some are returned to the caller, else reused every step."""
        if num_logits:
            return np.empty((num_sampled + num_logits, self.vocab_size), np.float32)
        if len(self._logits) < num_sampled:
            self._logits = np.empty((num_sampled, self.vocab_size), np.float32)
        return self._logits[:num_sampled]

    def profile(self) -> Floats:
        """Seconds spent in each operation since the last call; the first call starts measuring."""
        seconds = np.zeros(len(self.model.plan.operations), np.float64)
        native_functions().unspool_profile(self._runner.handle, address_of(seconds))
        return seconds.astype(np.float32)


def _reserve_zeros(size: int) -> npt.NDArray[np.uint8]:
    """Reserve zeroed memory that is committed only as it is written, in huge pages if possible."""
    try:
        memory = mmap.mmap(-1, size)
    except (OSError, OverflowError, MemoryError) as error:
        raise UnspoolError(
            f"the system cannot reserve {size:,} bytes for the KV cache; lower memory"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class _RopeTables:
    """Cosines and sines by position, one table per RoPE variant of the model; grows on demand."""

    def __init__(self, model: PlannedModel, context: int) -> None:
        self._variants = model.plan.rotary
        self._context = context
        self._size = 0  # positions
        self._tables: list[Floats] = []
        self._structures = (RopeTableStruct * max(1, len(self._variants)))()

    def address_for(self, count: int) -> int:
        """Address of the tables, grown to `count` positions (at most the context length)."""
        count = min(count, self._context)
        if count > self._size:
            self._size = max(count, min(self._context, max(_MIN_ROPE_POSITIONS, 2 * self._size)))
            positions = np.arange(self._size)
            self._tables = []
            for index, rope in enumerate(self._variants):
                cosine, sine = (
                    np.ascontiguousarray(table, np.float32)
                    for table in rope.tables(positions, self._context)
                )
                self._tables += [cosine, sine]
                self._structures[index] = RopeTableStruct(
                    address_of(cosine), address_of(sine), self._size, rope.width // 2
                )
        return ctypes.addressof(self._structures)


class _CpuObserver:
    """Buffers that the kernels fill with observed values, and their `Observations`."""

    def __init__(
        self, model: PlannedModel, batch: StepBatch, look: ObserveRequest, num_outputs: int
    ) -> None:
        config, plan = model.config, model.plan
        self._look, self._plan = look, plan
        self._rows = np.unique(np.concatenate((look.residuals, look.parts, look.tokens)))
        observed = np.concatenate([self._rows, look.attention])
        if len(observed) and not 0 <= observed.min() <= observed.max() < len(batch.tokens):
            raise UnspoolError("the observed tokens are not in the batch")
        self._token_rows = np.full(len(batch.tokens), -1, np.int64)
        self._token_rows[self._rows] = np.arange(len(self._rows))
        self._layers = range(config.layers + 1) if look.layers is None else look.layers
        streams = [("resid", layer) for layer in self._layers] if len(look.residuals) else []
        if len(look.parts):
            streams += [("resid", layer) for layer in range(config.layers + 1)]
            streams += [("resid_mid", layer) for layer in range(config.layers)]
        # Values of a place, by its number; two names of the residual stream have the same place.
        self._values: dict[int, Floats] = {}
        for number in (plan.sites[name] for name in streams):
            self._values[number] = np.empty((len(self._rows), config.width), np.float32)
        for site, layer in look.sites:
            number = plan.site_number(site, layer)
            if number not in self._values:
                num_rows = num_outputs if site in OUTPUT_SITES else len(self._rows)
                width = site_width(config, site, layer)
                self._values[number] = np.empty((num_rows, width), np.float32)
        self._targets = np.zeros(len(plan.sites), np.uint64)
        for number, values in self._values.items():
            self._targets[number] = address_of(values)
        self._visible = batch.visible_end[look.attention]
        self._shape = (config.layers, config.heads)
        sizes = self._visible * config.layers * config.heads
        self._starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        self._weights = np.zeros(int(self._starts[-1]), np.float32)
        self._offsets = np.full(len(batch.tokens), -1, np.int64)
        self._offsets[look.attention] = self._starts[:-1]
        self.taps = TapsStruct(
            address_of(self._targets),
            address_of(self._token_rows),
            num_outputs,
            address_of(self._offsets) if len(look.attention) else None,
            address_of(self._weights),
            config.heads,
        )
        self._recurrent = None
        if config.state_bytes:
            self._recurrent = RecurrentObserver(config, look, len(batch.tokens))
            self._recurrent.set_taps(self.taps)

    def _at(self, names: Iterable[tuple[str, int]], tokens: Ints) -> Floats:
        """Values of places at some of the observed tokens, [places, tokens, width]."""
        rows = self._token_rows[tokens]
        return np.stack([self._values[self._plan.sites[name]][rows] for name in names])

    def inside(self) -> Observations:
        look, num_layers = self._look, self._shape[0]
        residuals = parts = None
        if len(look.residuals):
            residuals = self._at([("resid", layer) for layer in self._layers], look.residuals)
        if len(look.parts):
            stream = self._at([("resid", layer) for layer in range(num_layers + 1)], look.parts)
            middle = self._at([("resid_mid", layer) for layer in range(num_layers)], look.parts)
            parts = np.stack((middle - stream[:-1], stream[1:] - middle), axis=1)
        attention = [
            self._weights[start:end].reshape(*self._shape, visible)
            for start, end, visible in zip(
                self._starts[:-1], self._starts[1:], self._visible.tolist(), strict=True
            )
        ]
        rows, sites = self._token_rows[look.tokens], dict[tuple[str, int], Floats]()
        for name in look.sites:
            values = self._values[self._plan.site_number(*name)]
            sites[name] = values if name[0] in OUTPUT_SITES else values[rows]
        recurrent = self._recurrent.stats() if self._recurrent else []
        return Observations(residuals, attention, parts, recurrent=recurrent, sites=sites)
