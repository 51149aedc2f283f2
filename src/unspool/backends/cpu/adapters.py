"""LoRA adapters on the native backend: their matrices in the kernels' layout, and the adapter of
each row.

The kernel is `native/kernels/lora.cpp`. It adds to the result of a product, so the packed weights
stay unchanged and rows with different adapters share a step.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from unspool.backends.cpu.packing import LANES
from unspool.backends.cpu.structures import LOW_RANK, AdaptersStruct, address_of
from unspool.backends.step import Floats, Ints, StepBatch
from unspool.errors import UnspoolError

if TYPE_CHECKING:
    from unspool.backends.cpu.plan import ExecutionPlan
    from unspool.model.adapters import Adapter


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
