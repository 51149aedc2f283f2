"""Plans inside the native library: `CompiledPlan`, and `Program` for small plans outside a model.

A `Program` runs a list of operations over buffers that the caller reads and writes, such as those
of a drafting head:

    program = Program(plan, matrices, vectors, threads=4, rows=8, shared=("x", "y"))
    program.buffers["x"][:count] = ...
    program.run(count)                      # operations on `selected` rows
    program.run_tokens(tokens, kv_pages)    # operations on tokens, with attention over pages
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.backends.cpu.packing import MatrixStruct, PackedMatrix
from unspool.backends.cpu.plan import ExecutionPlan
from unspool.backends.cpu.structures import (
    ROWS,
    BatchStruct,
    KvCacheStruct,
    LayerPagesStruct,
    ModelSpecStruct,
    OpStruct,
    RopeTableStruct,
    VectorStruct,
    address_of,
    native_functions,
)
from unspool.backends.step import Floats, Ints
from unspool.errors import UnspoolError

PAGE = 16  # tokens
_SLACK = 16  # rows after the last one that kernels may read
_LANES = 16  # floats of a register


class CompiledPlan:
    """A plan in the native library: operations with the addresses of their weights, and working
    memory. Not thread-safe."""

    def __init__(
        self,
        plan: ExecutionPlan,
        matrices: Sequence[MatrixStruct],
        vectors: Sequence[Floats],
        *,
        threads: int,
        logits_buffer: int = -1,
        experts: int = 0,
        experts_per_token: int = 0,
        owner: Any = None,
    ) -> None:
        """`matrices` in the order of `plan.encode()`, `vectors` in that of `plan.vectors`; `owner`
        keeps the memory of the matrices alive."""
        ops, _ = plan.encode()
        structs = [VectorStruct(address_of(vector), vector.size) for vector in vectors]
        widths = np.array([width for width, _ in plan.buffers.values()], np.int64)
        rows = np.array([ROWS[kind] for _, kind in plan.buffers.values()], np.int32)
        self._spec = ModelSpecStruct(
            ops=(OpStruct * len(ops))(*ops),
            op_count=len(ops),
            matrices=(MatrixStruct * len(matrices))(*matrices),
            matrix_count=len(matrices),
            vectors=(VectorStruct * max(1, len(structs)))(*structs),
            vector_count=len(structs),
            buffer_widths=address_of(widths),
            buffer_rows=address_of(rows),
            buffer_count=len(widths),
            logits_buffer=logits_buffer,
            experts=experts,
            experts_per_token=experts_per_token,
            threads=threads,
        )
        self._alive: tuple[Any, ...] = (owner, vectors, widths, rows)  # the library points at them
        self._free = native_functions().unspool_model_free
        self.handle = native_functions().unspool_model_new(ctypes.byref(self._spec))
        if not self.handle:
            raise UnspoolError("not enough memory to run the model")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._free(self.handle)
            self.handle = None


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Tokens, one per row, that attend to the same pages."""

    tokens: Ints
    positions: Ints
    num_visible: int  # number of keys they attend to
    num_pages: int  # number of pages


class FloatKvPages:
    """Keys and values of one layer in float32, in consecutive pages."""

    def __init__(self, heads: int, width: int, cosine: Floats, sine: Floats) -> None:
        self._shape = (heads, width)
        self._padded_width = -(-width // _LANES) * _LANES
        self._memory: Floats = np.zeros((0, 2, heads, PAGE * self._padded_width), np.float32)
        self._angles = (cosine, sine)

    def write(self, first: int, keys: Floats, values: Floats) -> None:
        """Write keys and values [n, heads, width] at positions `first` and up."""
        heads, width = self._shape
        padded, size = self._padded_width, self._memory.shape[1:]
        positions = np.arange(first, first + len(keys))
        needed = -(-(first + len(keys)) // PAGE)
        if needed > len(self._memory):
            grown = np.zeros((max(needed, 2 * len(self._memory)), *size), np.float32)
            grown[: len(self._memory)] = self._memory
            self._memory = grown
        page, slot = positions // PAGE, positions % PAGE
        count = len(self._memory)
        self._memory[:, 0].reshape(count, heads, padded, PAGE)[page, :, :width, slot] = keys
        self._memory[:, 1].reshape(count, heads, PAGE, padded)[page, :, slot, :width] = values

    def copy(self, count: int) -> FloatKvPages:
        """Copy the first `count` positions."""
        heads, width = self._shape
        other = FloatKvPages(heads, width, *self._angles)
        other._memory = self._memory[: -(-count // PAGE)].copy()
        return other

    @property
    def num_pages(self) -> int:
        """Number of pages."""
        return len(self._memory)

    def structures(self) -> tuple[KvCacheStruct, RopeTableStruct]:
        cosine, sine = self._angles
        layers = (LayerPagesStruct * 1)(LayerPagesStruct(0, *self._shape))
        page_bytes = self._memory[0].nbytes if self.num_pages else 0
        kv_cache = KvCacheStruct(address_of(self._memory), self.num_pages, page_bytes, layers, 32)
        return kv_cache, RopeTableStruct(address_of(cosine), address_of(sine), *cosine.shape)


class NativeProgram(CompiledPlan):
    """A plan without a model. The caller shares the buffers named in `shared`."""

    def __init__(
        self,
        plan: ExecutionPlan,
        matrices: Mapping[str, PackedMatrix],
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
        _, names = plan.encode()
        super().__init__(
            plan,
            [matrices[name].matrix for name in names],
            [np.ascontiguousarray(vectors[name], np.float32) for name in plan.vectors],
            threads=threads,
            owner=matrices,
        )
        addresses = [
            address_of(self.buffers[n]) if n in self.buffers else None for n in plan.buffers
        ]
        self._buffer_addresses = (ctypes.c_void_p * len(addresses))(*addresses)
        self._indices = np.arange(rows + 1)
        self._zeros = np.zeros(rows, np.int64)

    def run(self, count: int) -> None:
        """Run the operations on the first `count` rows of the buffers."""
        self._launch(BatchStruct(selected_count=count), KvCacheStruct(), RopeTableStruct())

    def run_tokens(self, rows: TokenRows, memory: FloatKvPages) -> None:
        """Run the operations on single tokens; all of their rows are selected."""
        count = len(rows.tokens)
        indices, table = self._indices, np.arange(rows.num_pages)
        visible = np.full(count, rows.num_visible, np.int64)
        arrays = (rows.tokens, rows.positions, visible, indices, self._zeros, table, indices)
        batch = BatchStruct(*map(address_of, arrays), count, count, 1, len(table), count)
        self._launch(batch, *memory.structures())

    def _launch(
        self, batch: BatchStruct, kv_cache: KvCacheStruct, rope_table: RopeTableStruct
    ) -> None:
        status = native_functions().unspool_run_buffers(
            self.handle,
            ctypes.addressof(kv_cache),
            ctypes.addressof(rope_table),
            ctypes.addressof(batch),
            ctypes.addressof(self._buffer_addresses),
        )
        if status:
            raise UnspoolError(f"running the drafting head failed (status {status})")
