"""Small programs on the native kernels: a list of operations over buffers that the caller can read
and write, for what is no model of its own, such as a drafting head.

    program = Program(plan, matrices, vectors, threads=4, rows=8, shared=("x", "y"))
    program.buffers["x"][:count] = ...
    program.run(count)                         # operations on `wanted` rows
    program.run_tokens(batch, keys_values)     # ... on tokens, with attention over pages
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.backends.cpu.layout import Matrix
from unspool.backends.cpu.packing import Packed
from unspool.backends.cpu.plan import Plan
from unspool.backends.cpu.structures import (
    ROWS,
    BatchStructure,
    KeyValues,
    LayerPages,
    ModelSpec,
    Op,
    RotaryTable,
    Vector,
    address,
    functions,
)
from unspool.backends.step import Floats, Ints
from unspool.errors import UnspoolError

PAGE = 16  # tokens
_SLACK = 16  # rows that kernels may read behind the last
_LANES = 16  # numbers of a register


@dataclass(frozen=True, slots=True)
class Tokens:
    """Single tokens, each a row, that look at one line of pages."""

    tokens: Ints
    positions: Ints
    visible: int  # how many keys they see
    pages: int  # how many there are


class PagedFloats:
    """Keys and values of one layer in 32 bits, in pages that are simply numbered."""

    def __init__(self, heads: int, width: int, cosine: Floats, sine: Floats) -> None:
        self._shape = (heads, width)
        self._filled = -(-width // _LANES) * _LANES  # heads are filled up with zeros
        self._memory: Floats = np.zeros((0, 2, heads, PAGE * self._filled), np.float32)
        self._angles = (cosine, sine)

    def write(self, first: int, keys: Floats, values: Floats) -> None:
        """Put keys and values [n, heads, width] at the places from `first` on."""
        heads, width = self._shape
        filled, size = self._filled, self._memory.shape[1:]
        places = np.arange(first, first + len(keys))
        needed = -(-(first + len(keys)) // PAGE)
        if needed > len(self._memory):
            grown = np.zeros((max(needed, 2 * len(self._memory)), *size), np.float32)
            grown[: len(self._memory)] = self._memory
            self._memory = grown
        page, slot = places // PAGE, places % PAGE
        count = len(self._memory)
        self._memory[:, 0].reshape(count, heads, filled, PAGE)[page, :, :width, slot] = keys
        self._memory[:, 1].reshape(count, heads, PAGE, filled)[page, :, slot, :width] = values

    def copy(self, count: int) -> PagedFloats:
        """The same with the first `count` places."""
        heads, width = self._shape
        other = PagedFloats(heads, width, *self._angles)
        other._memory = self._memory[: -(-count // PAGE)].copy()
        return other

    @property
    def pages(self) -> int:
        return len(self._memory)

    def structures(self) -> tuple[KeyValues, RotaryTable]:
        cosine, sine = self._angles
        layers = (LayerPages * 1)(LayerPages(0, *self._shape))
        bytes = self._memory[0].nbytes if self.pages else 0
        kept = KeyValues(address(self._memory), self.pages, bytes, layers, 32)
        return kept, RotaryTable(address(cosine), address(sine), *cosine.shape)


class Program:
    """Operations with the weights they name, and memory for a number of rows."""

    def __init__(
        self,
        plan: Plan,
        matrices: Mapping[str, Packed],
        vectors: Mapping[str, Floats],
        *,
        threads: int,
        rows: int,
        shared: Sequence[str],
    ) -> None:
        self.rows = rows
        self.buffers: dict[str, Floats] = {
            name: np.zeros((rows + _SLACK, plan.buffers[name][0]), np.float32) for name in shared
        }
        ops, names = plan.encoded()
        kept = [np.ascontiguousarray(vectors[name], np.float32) for name in plan.vectors]
        every = [Vector(address(array), array.size) for array in kept]
        widths = np.array([width for width, _ in plan.buffers.values()], np.int64)
        kinds = np.array([ROWS[kind] for _, kind in plan.buffers.values()], np.int32)
        spec = ModelSpec(
            ops=(Op * len(ops))(*ops),
            op_count=len(ops),
            matrices=(Matrix * len(names))(*(matrices[name].matrix for name in names)),
            matrix_count=len(names),
            vectors=(Vector * max(1, len(every)))(*every),
            vector_count=len(every),
            buffer_widths=address(widths),
            buffer_rows=address(kinds),
            buffer_count=len(widths),
            logits_buffer=-1,
            threads=threads,
        )
        given = [address(self.buffers[n]) if n in self.buffers else None for n in plan.buffers]
        self._given = (ctypes.c_void_p * len(given))(*given)
        self._numbers = np.arange(rows + 1)
        self._zeros = np.zeros(rows, np.int64)
        self._kept: tuple[Any, ...] = (matrices, kept, widths, kinds, spec)
        self._free = functions().unspool_model_free
        self._handle = functions().unspool_model_new(ctypes.byref(spec))
        if not self._handle:
            raise UnspoolError("there is not enough memory to run a drafting head")

    def run(self, count: int) -> None:
        """The operations on the first `count` rows of the buffers."""
        self._launch(BatchStructure(wanted_count=count), KeyValues(), RotaryTable())

    def run_tokens(self, given: Tokens, memory: PagedFloats) -> None:
        """The operations on single tokens; their rows are the wanted ones too."""
        count = len(given.tokens)
        numbers, table = self._numbers, np.arange(given.pages)
        visible = np.full(count, given.visible, np.int64)
        arrays = (given.tokens, given.positions, visible, numbers, self._zeros, table, numbers)
        batch = BatchStructure(*map(address, arrays), count, count, 1, len(table), count)
        self._launch(batch, *memory.structures())

    def _launch(self, batch: BatchStructure, kept: KeyValues, angles: RotaryTable) -> None:
        status = functions().unspool_run_given(
            self._handle,
            ctypes.addressof(kept),
            ctypes.addressof(angles),
            ctypes.addressof(batch),
            ctypes.addressof(self._given),
        )
        if status:
            raise UnspoolError(f"the drafting head could not be run (status {status})")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._free(self._handle)
            self._handle = None
