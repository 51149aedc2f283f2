"""The native backend: a batch in, logits out, in one call of the compiled library.

Keys and values lie in pages of sixteen tokens, in 16 or 8 bits a number. The memory is asked for
at once but taken by the system only as pages are written.
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
from unspool.backends.cpu.recurrent_look import RecurrentLook
from unspool.backends.cpu.structures import (
    BatchStructure,
    KeyValues,
    LayerPages,
    RotaryTable,
    TapList,
    address,
    contiguous,
    functions,
)
from unspool.backends.cpu.threads import FORKED
from unspool.backends.memory import free_memory, pages_and_states
from unspool.backends.step import (
    BlockTable,
    Done,
    Floats,
    Inside,
    Ints,
    Look,
    StepBatch,
    StepResult,
    no_ints,
)
from unspool.errors import UnspoolError
from unspool.sampling.picker import pick

if TYPE_CHECKING:
    from unspool.backends.cpu.plan import Plan
    from unspool.model.adapters import Adapter
    from unspool.model.config import ModelConfig

PAGE_SIZE = 16
_NO_LOGPROBS = np.empty(0)
LANES = 16
_FIRST_ANGLES = 512  # positions whose angles are worked out at first; then twice as many, and so on
_FAULTS = {
    1: "there is not enough memory for a batch of {count} tokens; allow less at once",
    2: "the system gave no more threads; ask for fewer with threads=1",
    3: "the batch names a token, a position, a page or a state that does not exist",
}


def page_layout(config: ModelConfig, kv_bits: int) -> tuple[Any, int]:
    """Where each layer's keys and values lie in a page of sixteen tokens, and the page's bytes.

    A layer that shares those of another has the other's place, one that has none no heads.
    """
    layers, size = (LayerPages * config.layers)(), 0
    for layer in config.kv_layers:
        heads, width = config.kv_shape(layer)
        layers[layer] = LayerPages(size, heads, width)
        filled = -(-width // LANES) * LANES
        scales = 4 * PAGE_SIZE if kv_bits == 8 else 0
        size += 2 * heads * (PAGE_SIZE * filled * kv_bits // 8 + scales)
    for layer in range(config.layers):
        layers[layer] = layers[config.kv_source(layer)]
    return layers, size


class Runner(Protocol):
    """A model as the library holds it, with room for the runs of one backend."""

    @property
    def handle(self) -> int: ...


class PlannedModel(Protocol):
    """What a backend needs of a model whose weights are in memory."""

    kv_bits: int
    threads: int

    @property
    def config(self) -> ModelConfig: ...

    @property
    def plan(self) -> Plan: ...

    def new_runner(self) -> Runner: ...


class CpuBackend:
    """A native model behind the engine's contract."""

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
        self.echoes = not self.state_bytes  # a token's state is that of its own row
        self.page_count, self.state_count = pages_and_states(
            memory, self.page_bytes, self.state_bytes
        )
        self.vocab_size = config.vocab_size
        self.context = context
        self._memory = _untouched(self.page_count * self.page_bytes)
        self._states = _untouched(max(1, self.state_count * self.state_bytes))
        self._kv = KeyValues(
            data=address(self._memory),
            pages=self.page_count,
            page_bytes=self.page_bytes,
            layers=layers,
            bits=model.kv_bits,
        )
        self._runner = model.new_runner()
        self._angles = _Angles(model, context)
        self._process = os.getpid()
        self._turn = threading.Lock()
        self._table = BlockTable()
        self._adapters = CpuAdapters(model.plan)
        self._logits = np.empty((0, self.vocab_size), np.float32)

    def launch(self, batch: StepBatch) -> Done:
        """Run the whole step in one call of the library, the picking of tokens in another."""
        if os.getpid() != self._process:
            raise UnspoolError(FORKED)
        with self._turn:
            self._table.apply(batch.updates)
            for source, target in batch.copies.tolist():
                self._copy_page(source, target)
            return Done(self._run(batch))

    def set_adapter(self, number: int, adapter: Adapter | None) -> None:
        with self._turn:
            self._adapters.set(number, adapter)

    def _copy_page(self, source: int, target: int) -> None:
        if not (0 <= source < self.page_count and 0 <= target < self.page_count):
            raise UnspoolError(
                f"pages go from 0 to {self.page_count - 1}, not {source} or {target}"
            )
        functions().unspool_copy_page(ctypes.byref(self._kv), source, target)

    def _run(self, batch: StepBatch) -> StepResult:
        picked, asked = len(batch.sampled), len(batch.logits)
        wanted = np.concatenate((batch.sampled, batch.logits)) if asked else batch.sampled
        arrays = [
            contiguous(array)
            for array in (
                batch.tokens, batch.positions, batch.visible_end, batch.starts, batch.slots,
                self._table.pages, wanted,
            )
        ]  # fmt: skip
        count, rows = len(batch.tokens), len(batch.starts) - 1
        if {len(batch.positions), len(batch.visible_end)} != {count} or len(batch.slots) != rows:
            raise UnspoolError(_FAULTS[3])
        structure = BatchStructure(
            *map(address, arrays), count, rows, *self._table.pages.shape, len(wanted)
        )
        adapters = self._adapters.of(batch) if len(batch.adapters) else None
        structure.adapters = ctypes.addressof(adapters.list) if adapters else None
        if len(batch.echoes):
            lines = contiguous(batch.echoes[:, 1])
            starts = contiguous(np.searchsorted(batch.echoes[:, 0], np.arange(count + 1)))
            structure.echo_starts, structure.echo_lines = address(starts), address(lines)
        kept = self._put_states(structure, batch) if self.state_bytes else ()
        logits = self._room_for(picked, asked)
        watch = _Watch(self.model, batch, batch.look) if batch.look else None
        status = functions().unspool_run(
            self._runner.handle,
            ctypes.addressof(self._kv),
            self._angles.up_to(int(arrays[1].max()) + 1 if count else 0),
            ctypes.addressof(structure),
            ctypes.addressof(watch.list) if watch else None,
            address(logits),
        )
        del kept
        if status:
            raise UnspoolError(_FAULTS[status].format(count=count))
        inside = watch.inside() if watch else None
        if batch.pick is None:
            return StepResult(no_ints(), _NO_LOGPROBS, logits[picked:], inside)
        found = pick(logits[:picked], batch.pick, self.model.threads)
        return StepResult(found.tokens, found.logprobs, logits[picked:], inside, found.failures)

    def _put_states(self, structure: BatchStructure, batch: StepBatch) -> tuple[Ints, ...]:
        """The slots of recurrent states into what the library gets; the arrays must outlive it."""
        rows, count = len(batch.starts) - 1, len(batch.tokens)
        tokens = batch.captures[:, 0]
        ordered = len(tokens) == 0 or (tokens[0] >= 0 and tokens[-1] < count)
        if batch.states.shape != (rows, 2) or not ordered or (np.diff(tokens) < 0).any():
            raise UnspoolError(_FAULTS[3])
        states = contiguous(batch.states)
        structure.state_data, structure.state_slots = address(self._states), self.state_count
        structure.state_floats, structure.states = self.state_bytes // 4, address(states)
        if not len(tokens):
            return (states,)
        slots = contiguous(batch.captures[:, 1])
        starts = contiguous(np.searchsorted(tokens, np.arange(count + 1)))
        structure.capture_starts, structure.capture_slots = address(starts), address(slots)
        return states, slots, starts

    def _room_for(self, picked: int, asked: int) -> Floats:
        """Memory for logits: new where they are given away, and otherwise that of the last step."""
        if asked:
            return np.empty((picked + asked, self.vocab_size), np.float32)
        if len(self._logits) < picked:
            self._logits = np.empty((picked, self.vocab_size), np.float32)
        return self._logits[:picked]

    def profile(self) -> Floats:
        """Seconds in each operation since the last call; the first call begins to measure."""
        seconds = np.zeros(len(self.model.plan.operations), np.float64)
        functions().unspool_profile(self._runner.handle, address(seconds))
        return seconds.astype(np.float32)


def _untouched(size: int) -> npt.NDArray[np.uint8]:
    """Zeros that the system gives only as they are written, in large pages where it can."""
    try:
        memory = mmap.mmap(-1, size)
    except (OSError, OverflowError, MemoryError) as error:
        raise UnspoolError(
            f"keys and values were to take {size:,} bytes, which the system does not give; "
            "set a lower memory"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class _Angles:
    """Cosines and sines of every position so far, one table for each way that layers turn."""

    def __init__(self, model: PlannedModel, context: int) -> None:
        self._ways = model.plan.rotary
        self._context = context
        self._known = 0
        self._tables: list[Floats] = []
        self._structures = (RotaryTable * max(1, len(self._ways)))()

    def up_to(self, count: int) -> int:
        """The address of the tables, which hold so many positions, if the context has them."""
        count = min(count, self._context)
        if count > self._known:
            self._known = max(count, min(self._context, max(_FIRST_ANGLES, 2 * self._known)))
            positions = np.arange(self._known)
            self._tables = []
            for number, way in enumerate(self._ways):
                cosine, sine = (
                    np.ascontiguousarray(table, np.float32)
                    for table in way.tables(positions, self._context)
                )
                self._tables += [cosine, sine]
                self._structures[number] = RotaryTable(
                    address(cosine), address(sine), self._known, way.width // 2
                )
        return ctypes.addressof(self._structures)


class _Watch:
    """Room for what the taps ask for, and what was seen made into arrays."""

    def __init__(self, model: PlannedModel, batch: StepBatch, taps: Look) -> None:
        config = model.config
        self._taps = taps
        self._rows = np.union1d(taps.residuals, taps.parts).astype(np.int64)
        every = np.concatenate([self._rows, taps.attention])
        if len(every) and not 0 <= every.min() <= every.max() < len(batch.tokens):
            raise UnspoolError("the taps name a token that is not in the batch")
        count = 2 * config.layers + 1  # before the first layer, and after the halves of each
        self._places: Ints | None = None
        if taps.layers is not None:  # only some, so nothing of what lies between them
            before = 2 * np.array(taps.layers, np.int64)
            self._places = np.full(count, -1, np.int64)
            self._places[before] = np.arange(len(before))
            count = len(before)
        self._snapshots = np.empty((count, len(self._rows), config.width), np.float32)
        self._past = batch.visible_end[taps.attention]
        self._shape = (config.layers, config.heads)
        sizes = self._past * config.layers * config.heads
        self._starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        self._weights = np.zeros(int(self._starts[-1]), np.float32)
        self._where = np.full(len(batch.tokens), -1, np.int64)
        self._where[taps.attention] = self._starts[:-1]
        self.list = TapList(
            address(self._rows),
            len(self._rows),
            address(self._snapshots),
            address(self._where) if len(taps.attention) else None,
            address(self._weights),
            None if self._places is None else address(self._places),
            config.heads,
        )
        self._recurrent = None
        if config.state_bytes:
            self._recurrent = RecurrentLook(config, taps, len(batch.tokens))
            self._recurrent.put(self.list)

    def inside(self) -> Inside:
        residuals = parts = None
        if len(self._taps.residuals):
            found = np.searchsorted(self._rows, self._taps.residuals)
            residuals = self._snapshots[:: 2 if self._places is None else 1, found]
        if len(self._taps.parts):
            found = np.searchsorted(self._rows, self._taps.parts)
            steps = np.diff(self._snapshots[:, found], axis=0)  # attention, feed, attention, ...
            parts = steps.reshape(-1, 2, *steps.shape[1:])
        attention = [
            self._weights[start:end].reshape(*self._shape, past)
            for start, end, past in zip(
                self._starts[:-1], self._starts[1:], self._past.tolist(), strict=True
            )
        ]
        recurrent = self._recurrent.seen() if self._recurrent else []
        return Inside(residuals, attention, parts, recurrent=recurrent)
