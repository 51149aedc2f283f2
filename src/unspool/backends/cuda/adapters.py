"""Adapters on a GPU: each line of a step goes through its own, beside the products all share.

What adapters add to one matrix lies together, with a slot for each adapter and zeros up to the
largest rank, so that a captured step stays right when an adapter comes or goes; only the slots that
its lines name change. Where several matrices lie together (query, key and value; gate and up), so
do the parts that adapters add to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from unspool.backends.cuda.kernels.adapters import expand, shrink
from unspool.backends.cuda.products import power_of_two
from unspool.backends.cuda.weights import Matrix, Weights
from unspool.backends.step import Ints
from unspool.errors import UnspoolError
from unspool.model.adapters import Adapter, LowRank

Adapt = Callable[[Matrix, Tensor, Tensor], None]
"""From a matrix, what it was multiplied with, and the product: add what the lines' adapters say."""

_FIRST_SLOTS = 8  # one of them nobody's
_LEAST_RANK = 16
_COLUMNS, _RANKS, _ROWS = 512, 16, 128  # of a program's tiles


@dataclass(slots=True, eq=False)
class _Beside:
    """What all adapters add to one matrix."""

    names: tuple[str, ...]  # of the matrices that lie together in it, ...
    borders: tuple[int, ...]  # ... and the row at which each begins, and the last ends
    columns: int
    down: Tensor  # [slots, matrices * rank, columns]
    up: Tensor  # [slots, rows, rank], the scale multiplied in
    low: Tensor  # [lines, matrices * rank]: between the two


class CudaAdapters:
    """The adapters of one backend."""

    def __init__(self, weights: Weights, lines: int) -> None:
        self._weights, self._lines = weights, lines
        self._known = _places(weights)
        self._beside: dict[Matrix, _Beside] = {}
        self._slots = _FIRST_SLOTS
        self._rank = _LEAST_RANK
        self._loaded: dict[int, tuple[int, Adapter]] = {}  # by number: the slot, and what it is

    def set(self, number: int, adapter: Adapter | None) -> bool:
        """Keep an adapter, or forget it. Says whether memory moved: graphs are void then.

        If memory is refused, everything is as it was before. The memory that all adapters share is
        freed with the last of them.
        """
        if adapter is None:
            if self._loaded.pop(number, None) is None or self._loaded:
                return False
            self._beside, self._slots, self._rank = {}, _FIRST_SLOTS, _LEAST_RANK
            return True
        taken = {slot for slot, _ in self._loaded.values()}
        slot = next(one for one in range(1, len(taken) + 2) if one not in taken)
        rank = max((part.rank for part in adapter.parts.values()), default=1)
        grows = slot >= self._slots or rank > self._rank
        before = dict(self._beside), self._slots, self._rank
        if grows:
            self._slots = max(self._slots, power_of_two(slot + 1))
            self._rank = max(self._rank, power_of_two(rank))
            self._beside = {}
        moved = grows or any(
            matrix not in self._beside
            for matrix, (names, _) in self._known.items()
            if any(name in adapter.parts for name in names)
        )
        try:
            for at, other in [*(self._loaded.values() if grows else ()), (slot, adapter)]:
                self._put(at, other)
        except BaseException:
            self._beside, self._slots, self._rank = before
            raise
        self._loaded[number] = slot, adapter
        return moved

    def slots_of(self, numbers: Ints) -> Ints:
        """The slot of each row's adapter; 0 is nobody's."""
        slots = np.zeros(len(numbers), np.int64)
        for number in np.unique(numbers).tolist():
            if number:
                if number not in self._loaded:
                    raise UnspoolError(f"there is no adapter with the number {number}")
                slots[numbers == number] = self._loaded[number][0]
        return slots

    def on_lines(self, slots: Tensor, *, pdl: bool = False) -> Adapt:
        """For lines whose slots lie on the device: by our own kernels, each line by itself."""

        def adapt(matrix: Matrix, x: Tensor, out: Tensor) -> None:
            beside = self._beside.get(matrix)
            if beside is None:
                return
            count, ranks, rows = len(x), beside.down.shape[1], matrix.rows
            low = beside.low[:count]
            if count > len(low):
                low = torch.empty(count, ranks, dtype=torch.float32, device=x.device)
            shrink[(count, -(-ranks // _RANKS))](
                x, beside.down, slots, low, K=beside.columns, N=ranks,
                BK=min(_COLUMNS, power_of_two(beside.columns)), BN=_RANKS, PDL=pdl, num_warps=4,
                launch_pdl=pdl,
            )  # fmt: skip
            second, third = [*beside.borders[1:-1], rows, rows][:2]
            expand[(count, -(-rows // _ROWS))](
                low, beside.up, slots, out, second, third, N=rows, R=self._rank,
                PARTS=len(beside.names), BN=_ROWS, PDL=pdl, num_warps=4, launch_pdl=pdl,
            )  # fmt: skip

        return adapt

    def on_runs(self, runs: Sequence[tuple[int, int, int]]) -> Adapt:
        """For the lines of texts (the first, behind the last, the slot): by the vendor's products,
        which a prompt is long enough for."""

        def adapt(matrix: Matrix, x: Tensor, out: Tensor) -> None:
            beside = self._beside.get(matrix)
            if beside is None:
                return
            for first, last, slot in runs:
                low = x[first:last] @ beside.down[slot].t()
                for number, (begin, end) in enumerate(pairwise(beside.borders)):
                    mine = low[:, number * self._rank : (number + 1) * self._rank]
                    out[first:last, begin:end].addmm_(mine, beside.up[slot, begin:end].t())

        return adapt

    @torch.inference_mode(False)  # what it makes is written to in either mode
    def _put(self, slot: int, adapter: Adapter) -> None:
        for matrix, (names, borders) in self._known.items():
            parts = [adapter.parts.get(name) for name in names]
            beside = self._beside.get(matrix)
            if beside is None:
                if not any(parts):
                    continue
                beside = self._beside[matrix] = self._room(matrix, names, borders)
            down, up = beside.down[slot].zero_(), beside.up[slot].zero_()
            for number, part in enumerate(parts):
                if part is not None:
                    first = number * self._rank
                    down[first : first + part.rank] = torch.from_numpy(part.down).to(down)
                    rows = slice(borders[number], borders[number + 1])
                    up[rows, : part.rank] = _scaled_up(part).to(up)

    def _room(self, matrix: Matrix, names: tuple[str, ...], borders: tuple[int, ...]) -> _Beside:
        dtype, device = self._weights.dtype, self._weights.device
        ranks, columns = len(names) * self._rank, matrix.columns
        return _Beside(
            names,
            borders,
            columns,
            torch.zeros(self._slots, ranks, columns, dtype=dtype, device=device),
            torch.zeros(self._slots, matrix.rows, self._rank, dtype=dtype, device=device),
            torch.zeros(self._lines, ranks, dtype=torch.float32, device=device),
        )


def _scaled_up(part: LowRank) -> Tensor:
    return torch.from_numpy(part.up * np.float32(part.scale))


def _places(weights: Weights) -> dict[Matrix, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Every matrix that adapters may add to: the names of those that lie together in it, and where
    the rows of each begin and end."""
    config = weights.config
    queries, keys = config.heads * config.head_width, config.kv_width
    found: dict[Matrix, tuple[tuple[str, ...], tuple[int, ...]]] = {}

    def note(matrix: Matrix | None, *parts: tuple[str, int]) -> None:
        if matrix is not None:
            borders = np.cumsum([0, *(rows for _, rows in parts)]).tolist()
            found[matrix] = tuple(name for name, _ in parts), tuple(borders)

    for number, layer in enumerate(weights.layers):
        attention, feed = f"layers.{number}.attention", f"layers.{number}.feed"
        note(
            layer.qkv,
            (f"{attention}.q.weight", queries),
            (f"{attention}.k.weight", keys),
            (f"{attention}.v.weight", keys),
        )
        note(layer.out, (f"{attention}.out.weight", config.width))
        inner = [(f"{feed}.{name}.weight", config.ff_width) for name in ("gate", "up")]
        note(layer.gate_up, *inner[not config.gated :])
        note(layer.down, (f"{feed}.down.weight", config.width))
    if not config.tied:
        note(weights.head, ("head.weight", config.vocab_size))
    return found
