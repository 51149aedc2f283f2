"""`CompiledPlan`: an execution plan inside the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from unspool.backends.cpu.packing import MatrixStruct
from unspool.backends.cpu.plan import ExecutionPlan
from unspool.backends.cpu.structures import (
    ROWS,
    ModelSpecStruct,
    OpStruct,
    VectorStruct,
    address_of,
    native_functions,
)
from unspool.backends.step import Floats
from unspool.errors import UnspoolError


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
