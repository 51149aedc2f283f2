"""Adapters in the native backend: their matrices laid out for the kernels, and which row has which.

The kernel is `native/kernels/adapt.cpp`. It adds behind a product, so the weights themselves stay
packed as they are, whatever a step's rows have.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from unspool.backends.cpu.structures import LOW_RANK, AdapterList, address
from unspool.backends.step import Floats, Ints, StepBatch
from unspool.errors import UnspoolError

if TYPE_CHECKING:
    from unspool.backends.cpu.plan import Plan
    from unspool.model.adapters import Adapter

_LANES = 16


@dataclass(slots=True)
class RowAdapters:
    """What the library is told of a step, and the memory that it points at."""

    list: AdapterList
    of_row: Ints


class CpuAdapters:
    """The adapters of one backend, each a line of one table: a part for each matrix of the plan."""

    def __init__(self, plan: Plan) -> None:
        _, self._names = plan.encoded()
        # Matrices with one input are multiplied together, and so are their parts.
        counts = [len(operation.matrices) for operation in plan.operations]
        self._starts = [0, *itertools.accumulate(counts)]
        self._kept: dict[int, list[Floats]] = {}  # what the lines point at, by adapter
        self._lines: dict[int, npt.NDArray[np.void]] = {}
        self._table = np.empty((0, len(self._names)), LOW_RANK)
        self._numbers: Ints = np.empty(0, np.int64)  # of the lines
        self._most = 1

    def set(self, number: int, adapter: Adapter | None) -> None:
        if adapter is None:
            self._lines.pop(number, None)
            self._kept.pop(number, None)
        else:
            self._lines[number], self._kept[number] = self._laid_out(adapter)
        self._numbers = np.array(list(self._lines), np.int64)
        self._table = np.stack(list(self._lines.values())) if self._lines else self._table[:0]
        sums = [
            self._table["rank"][:, start:end].sum(1).max(initial=1)
            for start, end in itertools.pairwise(self._starts)
        ]
        self._most = int(max(sums))

    def _laid_out(self, adapter: Adapter) -> tuple[npt.NDArray[np.void], list[Floats]]:
        unknown = adapter.parts.keys() - set(self._names)
        if unknown:
            raise UnspoolError(f"the native backend cannot adapt {min(unknown)}")
        line, kept = np.zeros(len(self._names), LOW_RANK), list[Floats]()
        for place, name in enumerate(self._names):
            part = adapter.parts.get(name)
            if part is None:
                continue
            blocks = -(-len(part.up) // _LANES)
            filled = np.zeros((blocks * _LANES, part.rank), np.float32)
            filled[: len(part.up)] = part.up * np.float32(part.scale)
            up = np.ascontiguousarray(filled.reshape(blocks, _LANES, -1).transpose(0, 2, 1))
            down = np.ascontiguousarray(part.down, np.float32)
            line[place] = (address(down), address(up), part.rank)
            kept += [down, up]
        return line, kept

    def of(self, batch: StepBatch) -> RowAdapters:
        """The adapters of a step's rows."""
        matches = batch.adapters[:, None] == self._numbers[None, :]
        found = np.where(matches.any(1), matches.argmax(1), -1)
        if ((found < 0) & (batch.adapters != 0)).any():
            raise UnspoolError("the step names an adapter that is not loaded")
        of_row = np.ascontiguousarray(found, np.int64)
        told = AdapterList(address(of_row), address(self._table), len(self._table), self._most)
        return RowAdapters(told, of_row)
