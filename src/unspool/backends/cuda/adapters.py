"""LoRA adapters on a GPU: each row of a step may use another adapter.

The weights of all adapters for one matrix are in one buffer with a slot per adapter, zero-padded to
the largest rank. So graphs stay valid when adapters are added or removed: only the slots of the
rows change. Adapters of fused matrices (query, key and value; gate and up) are fused too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from unspool.backends.cuda.kernels.gemv import expand, shrink
from unspool.backends.cuda.matmul import next_power_of_two
from unspool.backends.cuda.weights import WeightMatrix, Weights
from unspool.backends.step import Ints
from unspool.errors import UnspoolError
from unspool.model.adapters import Adapter, LowRank

Adapt = Callable[[WeightMatrix, Tensor, Tensor], None]
"""Adds the adapters' output to a product: (matrix, x, out)."""

_FIRST_SLOTS = 8  # slot 0: no adapter
_MIN_RANK = 16
_SHRINK_COLUMNS, _SHRINK_RANKS, _EXPAND_ROWS = 512, 16, 128  # tile sizes


@dataclass(slots=True, eq=False)
class MatrixAdapters:
    """Weights of all adapters for one matrix."""

    names: tuple[str, ...]  # of the matrices that are fused in it
    borders: tuple[int, ...]  # first row of each of them, and the end of the last
    columns: int
    down: Tensor  # [slots, matrices * rank, columns]
    up: Tensor  # [slots, rows, rank], multiplied by the scale
    low: Tensor  # [lines, matrices * rank]: down · x


class CudaAdapters:
    """The adapters of one backend."""

    def __init__(self, weights: Weights, rows: int) -> None:
        self._weights, self._rows = weights, rows
        self._targets = _adapter_targets(weights)
        self._matrix_adapters: dict[WeightMatrix, MatrixAdapters] = {}
        self._slots = _FIRST_SLOTS
        self._rank = _MIN_RANK
        self._loaded: dict[int, tuple[int, Adapter]] = {}  # by number: slot, adapter

    def set(self, number: int, adapter: Adapter | None) -> bool:
        """Add, replace or remove (None) an adapter. Return whether graphs must be recaptured.

        If allocation fails, nothing changes. The buffers are freed with the last adapter.
        """
        if adapter is None:
            if self._loaded.pop(number, None) is None or self._loaded:
                return False
            self._matrix_adapters, self._slots, self._rank = {}, _FIRST_SLOTS, _MIN_RANK
            return True
        used = {slot for slot, _ in self._loaded.values()}
        slot = next(slot for slot in range(1, len(used) + 2) if slot not in used)
        rank = max((part.rank for part in adapter.parts.values()), default=1)
        grows = slot >= self._slots or rank > self._rank
        backup = dict(self._matrix_adapters), self._slots, self._rank
        if grows:
            self._slots = max(self._slots, next_power_of_two(slot + 1))
            self._rank = max(self._rank, next_power_of_two(rank))
            self._matrix_adapters = {}
        has_moved = grows or any(
            matrix not in self._matrix_adapters
            for matrix, (names, _) in self._targets.items()
            if any(name in adapter.parts for name in names)
        )
        try:
            for slot_index, loaded in [*(self._loaded.values() if grows else ()), (slot, adapter)]:
                self._write_slot(slot_index, loaded)
        except BaseException:
            self._matrix_adapters, self._slots, self._rank = backup
            raise
        self._loaded[number] = slot, adapter
        return has_moved

    def slots_for(self, numbers: Ints) -> Ints:
        """Slot of each row's adapter; 0: no adapter."""
        slots = np.zeros(len(numbers), np.int64)
        for number in np.unique(numbers).tolist():
            if number:
                if number not in self._loaded:
                    raise UnspoolError(f"no adapter has the number {number}")
                slots[numbers == number] = self._loaded[number][0]
        return slots

    def for_rows(self, slots: Tensor, *, pdl: bool = False) -> Adapt:
        """Apply adapters row by row, with slots on the device. Can be captured."""

        def adapt(matrix: WeightMatrix, x: Tensor, out: Tensor) -> None:
            weights = self._matrix_adapters.get(matrix)
            if weights is None:
                return
            count, ranks, rows = len(x), weights.down.shape[1], matrix.rows
            low = weights.low[:count]
            if count > len(low):
                low = torch.empty(count, ranks, dtype=torch.float32, device=x.device)
            shrink[(count, -(-ranks // _SHRINK_RANKS))](
                x, weights.down, slots, low, K=weights.columns, N=ranks,
                BK=min(_SHRINK_COLUMNS, next_power_of_two(weights.columns)), BN=_SHRINK_RANKS,
                PDL=pdl,
                num_warps=4, launch_pdl=pdl,
            )  # fmt: skip
            borders = [*weights.borders[1:-1], rows, rows, rows][:3]
            expand[(count, -(-rows // _EXPAND_ROWS))](
                low, weights.up, slots, out, *borders, N=rows, R=self._rank,
                PARTS=len(weights.names), BN=_EXPAND_ROWS, PDL=pdl, num_warps=4, launch_pdl=pdl,
            )  # fmt: skip

        return adapt

    def for_chunks(self, chunks: Sequence[tuple[int, int, int]]) -> Adapt:
        """Apply adapters to chunks of rows (first, end, slot) by cuBLAS: for prefill."""

        def adapt(matrix: WeightMatrix, x: Tensor, out: Tensor) -> None:
            weights = self._matrix_adapters.get(matrix)
            if weights is None:
                return
            for first, last, slot in chunks:
                low = x[first:last] @ weights.down[slot].t()
                for number, (begin, end) in enumerate(pairwise(weights.borders)):
                    part = low[:, number * self._rank : (number + 1) * self._rank]
                    out[first:last, begin:end].addmm_(part, weights.up[slot, begin:end].t())

        return adapt

    @torch.inference_mode(False)  # its buffers are written with inference mode on and off
    def _write_slot(self, slot: int, adapter: Adapter) -> None:
        for matrix, (names, borders) in self._targets.items():
            parts = [adapter.parts.get(name) for name in names]
            weights = self._matrix_adapters.get(matrix)
            if weights is None:
                if not any(parts):
                    continue
                weights = self._matrix_adapters[matrix] = self._allocate(matrix, names, borders)
            down, up = weights.down[slot].zero_(), weights.up[slot].zero_()
            for number, part in enumerate(parts):
                if part is not None:
                    first = number * self._rank
                    down[first : first + part.rank] = torch.from_numpy(part.down).to(down)
                    rows = slice(borders[number], borders[number + 1])
                    up[rows, : part.rank] = _scaled_up(part).to(up)

    def _allocate(
        self, matrix: WeightMatrix, names: tuple[str, ...], borders: tuple[int, ...]
    ) -> MatrixAdapters:
        dtype, device = self._weights.dtype, self._weights.device
        ranks, columns = len(names) * self._rank, matrix.columns
        return MatrixAdapters(
            names,
            borders,
            columns,
            torch.zeros(self._slots, ranks, columns, dtype=dtype, device=device),
            torch.zeros(self._slots, matrix.rows, self._rank, dtype=dtype, device=device),
            torch.zeros(self._rows, ranks, dtype=torch.float32, device=device),
        )


def _scaled_up(part: LowRank) -> Tensor:
    return torch.from_numpy(part.up * np.float32(part.scale))


def _adapter_targets(
    weights: Weights,
) -> dict[WeightMatrix, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Matrices that adapters may change: names of their parts, and borders of the parts' rows."""
    targets: dict[WeightMatrix, tuple[tuple[str, ...], tuple[int, ...]]] = {}
    for matrix, parts in weights.parts.items():
        borders = np.cumsum([0, *(rows for _, rows in parts)]).tolist()
        targets[matrix] = tuple(name for name, _ in parts), tuple(borders)
    return targets
