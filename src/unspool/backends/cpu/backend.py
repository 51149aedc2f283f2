"""The native backend: a whole step in one call of the compiled library.

KV cache pages hold sixteen tokens, with 8, 16 or 32 bits per value. Their memory is reserved when
the backend is created, but the system provides it only as pages are written.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from unspool.backends.base import StepLimits
from unspool.backends.cpu.adapters import CpuAdapters
from unspool.backends.cpu.packing import LANES
from unspool.backends.cpu.recurrent_look import RecurrentObserver
from unspool.backends.cpu.structures import (
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
from unspool.backends.memory import free_memory, num_pages_and_states
from unspool.backends.step import (
    BlockTable,
    CompletedStep,
    Floats,
    Ints,
    Observations,
    ObserveRequest,
    StepBatch,
    StepResult,
    empty_ints,
)
from unspool.errors import UnspoolError
from unspool.sampling.picker import pick_tokens

if TYPE_CHECKING:
    from unspool.backends.cpu.plan import ExecutionPlan
    from unspool.backends.cpu.program import CompiledPlan
    from unspool.model.adapters import Adapter
    from unspool.model.config import ModelConfig

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
        logits = self._logits_buffer(num_sampled, num_logits)
        observer = _CpuObserver(self.model, batch, batch.observe) if batch.observe else None
        status = native_functions().unspool_run(
            self._runner.handle,
            ctypes.addressof(self._kv_cache),
            self._rope_tables.address_for(int(arrays[1].max()) + 1 if count else 0),
            ctypes.addressof(structure),
            ctypes.addressof(observer.taps) if observer else None,
            address_of(logits),
        )
        del state_arrays
        if status:
            raise UnspoolError(_ERRORS[status].format(count=count))
        inside = observer.inside() if observer else None
        if batch.sampling is None:
            return StepResult(empty_ints(), _NO_LOGPROBS, logits[num_sampled:], inside)
        picks = pick_tokens(logits[:num_sampled], batch.sampling, self.model.threads)
        return StepResult(
            picks.tokens, picks.logprobs, logits[num_sampled:], inside, picks.failures
        )

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
    """Buffers that the kernels fill with observed values, and their conversion to `Inside`."""

    def __init__(self, model: PlannedModel, batch: StepBatch, look: ObserveRequest) -> None:
        config = model.config
        self._look = look
        self._rows = np.union1d(look.residuals, look.parts).astype(np.int64)
        observed = np.concatenate([self._rows, look.attention])
        if len(observed) and not 0 <= observed.min() <= observed.max() < len(batch.tokens):
            raise UnspoolError("the observed tokens are not in the batch")
        count = 2 * config.layers + 1  # the first input, and after both halves of each layer
        self._snapshot_rows: Ints | None = None
        if look.layers is not None:  # only some layer inputs
            snapshots = 2 * np.array(look.layers, np.int64)
            self._snapshot_rows = np.full(count, -1, np.int64)
            self._snapshot_rows[snapshots] = np.arange(len(snapshots))
            count = len(snapshots)
        self._snapshots = np.empty((count, len(self._rows), config.width), np.float32)
        self._visible = batch.visible_end[look.attention]
        self._shape = (config.layers, config.heads)
        sizes = self._visible * config.layers * config.heads
        self._starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        self._weights = np.zeros(int(self._starts[-1]), np.float32)
        self._offsets = np.full(len(batch.tokens), -1, np.int64)
        self._offsets[look.attention] = self._starts[:-1]
        self.taps = TapsStruct(
            address_of(self._rows),
            len(self._rows),
            address_of(self._snapshots),
            address_of(self._offsets) if len(look.attention) else None,
            address_of(self._weights),
            None if self._snapshot_rows is None else address_of(self._snapshot_rows),
            config.heads,
        )
        self._recurrent = None
        if config.state_bytes:
            self._recurrent = RecurrentObserver(config, look, len(batch.tokens))
            self._recurrent.set_taps(self.taps)

    def inside(self) -> Observations:
        residuals = parts = None
        if len(self._look.residuals):
            indices = np.searchsorted(self._rows, self._look.residuals)
            residuals = self._snapshots[:: 2 if self._snapshot_rows is None else 1, indices]
        if len(self._look.parts):
            indices = np.searchsorted(self._rows, self._look.parts)
            added = np.diff(self._snapshots[:, indices], axis=0)  # attention, feed, attention, ...
            parts = added.reshape(-1, 2, *added.shape[1:])
        attention = [
            self._weights[start:end].reshape(*self._shape, visible)
            for start, end, visible in zip(
                self._starts[:-1], self._starts[1:], self._visible.tolist(), strict=True
            )
        ]
        recurrent = self._recurrent.stats() if self._recurrent else []
        return Observations(residuals, attention, parts, recurrent=recurrent)
