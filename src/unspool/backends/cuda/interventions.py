"""Interventions on the GPU: operations in a table at fixed addresses, read row by row.

One kernel at each touched site looks up the operations of each row (`kernels/interventions.py`), so
one captured graph serves any interventions at the same sites, and rows without any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unspool.backends.cuda.kernels.interventions import CHANGE_ADD, CHANGE_KINDS, change_rows
from unspool.backends.cuda.matmul import next_power_of_two
from unspool.backends.cuda.runner import LayerHooks
from unspool.backends.cuda.step_io import to_device
from unspool.backends.interventions import (
    OUTPUT_SITES,
    Intervention,
    StepInterventions,
    place_of,
    site_layers,
)
from unspool.backends.step import Ints
from unspool.model.config import ModelConfig

_POOL_FLOATS = 1 << 22  # first size of the vectors: 16 MB
_MAX_BLOCK = 4096  # columns that a program changes at a time


class VectorPool:
    """The arrays of interventions, one after the other on the device, until it is full."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.data = torch.zeros(_POOL_FLOATS, device=device)
        self.num_resets = 0
        self._places: dict[tuple[str, str], int] = {}
        self._end = 0

    def reserve(self, table: tuple[Intervention, ...]) -> None:
        """Make room for the arrays of a step, in a larger tensor if needed."""
        arrays = {
            (item.digest, name): array.size
            for item in table
            for name, array in item.op.arrays.items()
        }
        missing = sum(size for key, size in arrays.items() if key not in self._places)
        if self._end + missing <= len(self.data):
            return
        self._places, self._end = {}, 0
        self.num_resets += 1
        needed = sum(arrays.values())
        if needed > len(self.data):
            with torch.inference_mode(False):  # as the first one
                self.data = torch.zeros(2 * needed, device=self._device)

    def place(self, intervention: Intervention, name: str) -> int:
        """Where an array begins; it is copied there unless it is there."""
        key = (intervention.digest, name)
        at = self._places.get(key)
        if at is None:
            array = intervention.op.arrays[name].flatten()
            at = self._places[key] = self._end
            self._end += len(array)
            self.data[at : self._end].copy_(to_device(array, self._device))
        return at


class _Buffer:
    """A tensor that keeps its address while what it holds fits."""

    def __init__(self, device: torch.device) -> None:
        self.data = torch.zeros(1024, dtype=torch.int32, device=device)

    def fill(self, values: npt.NDArray[np.int32]) -> bool:
        """Copy values to its start; return whether the tensor has moved."""
        has_moved = len(values) > len(self.data)
        if has_moved:
            with torch.inference_mode(False):  # it is written with inference mode on and off
                self.data = self.data.new_zeros(2 * len(values))
        self.data[: len(values)].copy_(to_device(values, self.data.device))
        return has_moved


@dataclass(frozen=True, slots=True)
class _Entries:
    """Which operation changes which row where, in the order in which they are applied."""

    places: Ints
    rows: Ints
    ops: Ints


class RowChanges:
    """The operations on each row of a step, at each site."""

    def __init__(self, config: ModelConfig, pool: VectorPool, *, pdl: bool) -> None:
        device = pool.data.device
        self._config, self._pool, self._pdl = config, pool, pdl
        self._starts, self._entries, self._ops = (_Buffer(device) for _ in range(3))
        self._places: dict[tuple[str, int], int] = {}
        self._num_rows = 0
        self._vectors = pool.data
        self._current: Any = None  # what the tensors hold
        self.sites: frozenset[str] = frozenset()  # that are touched

    def __contains__(self, place: tuple[str, int]) -> bool:
        return place in self._places

    def set(self, step: StepInterventions | None, tokens: Ints, num_rows: int) -> bool:
        """Set the operations of a step; return whether graphs that read them must be captured anew.

        Args:
            tokens: The token of the batch that each row computes.
            num_rows: Rows of the tensors that are changed: at least `len(tokens)`, the same in all
                steps of a graph.
        """
        if step is None or not len(tokens):
            self.sites, self._places, self._current = frozenset(), {}, None
            return False
        current = (step.table, step.spans.tobytes(), tokens.tobytes(), num_rows)
        if (current, self._pool.num_resets) == self._current:
            return False
        starts, numbers, offsets = step.by_token(int(tokens.max()) + 1)
        counts = starts[tokens + 1] - starts[tokens]
        rows = np.repeat(np.arange(len(tokens)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        index = starts[tokens][rows] + within
        numbers, offsets = numbers[index], offsets[index]
        used = tuple(step.table[number] for number in np.unique(numbers).tolist())
        self._pool.reserve(used)
        self._set_places(frozenset(item.site for item in used))
        entries, ops = self._build(step.table, rows, numbers, offsets)
        self._num_rows = num_rows
        has_moved = self._vectors is not self._pool.data
        self._vectors = self._pool.data
        lists = np.bincount(
            entries.places * (num_rows + 1) + entries.rows + 1,
            minlength=len(self._places) * (num_rows + 1),
        )
        for buffer, values in (
            (self._starts, np.cumsum(lists)), (self._entries, entries.ops), (self._ops, ops),
        ):  # fmt: skip
            has_moved |= buffer.fill(values.astype(np.int32, copy=False))
        self._current = (current, self._pool.num_resets)
        return has_moved

    def _set_places(self, sites: frozenset[str]) -> None:
        """Number the places of these sites in all layers, so that a graph serves any layers."""
        places = {
            place_of(site, layer): None
            for site in sorted(sites)
            for layer in site_layers(self._config, site)
        }
        self.sites, self._places = sites, {place: number for number, place in enumerate(places)}

    def _build(
        self, table: tuple[Intervention, ...], rows: Ints, numbers: Ints, offsets: Ints
    ) -> tuple[_Entries, npt.NDArray[np.int32]]:
        ops: list[tuple[int, ...]] = []
        parts: list[tuple[Ints, Ints, Ints, Ints]] = []  # places, rows, order, operations
        for number in np.unique(numbers).tolist():
            touched = np.flatnonzero(numbers == number)
            item = table[number]
            for index, layer in item.resolve_layers(self._config):
                place = self._places[place_of(item.site, layer)]
                for part in item.slices(self._config, layer):
                    which = np.zeros(len(touched), np.int64)
                    at = offsets[touched] if item.num_tokens else which
                    distinct, which = np.unique(at, return_inverse=True)
                    which = which + len(ops)
                    ops += [self._encode(item, index, part, offset) for offset in distinct.tolist()]
                    parts.append((np.full_like(touched, place), rows[touched], touched, which))
        empty = np.empty(0, np.int64)
        places, rows, order, which = (
            (np.concatenate(columns) for columns in zip(*parts, strict=True))
            if parts
            else (empty,) * 4
        )
        by_row = np.lexsort((order, rows, places))
        entries = _Entries(places[by_row], rows[by_row], which[by_row])
        return entries, np.array(ops, np.int32).reshape(-1)

    def _encode(self, item: Intervention, index: int, part: slice, offset: int) -> tuple[int, ...]:
        """The fields of an operation: kind, columns, arrays, numbers; see `change_rows`."""
        op, width = item.op, part.stop - part.start
        kind = CHANGE_KINDS.get(op.kind, CHANGE_ADD)
        starts = [0, 0]
        for name, array in op.arrays.items():
            layer = min(index, len(array) - 1) if array.ndim > 1 else 0
            skipped = layer * array.shape[1] + offset if array.ndim == 3 else layer
            starts[name == "encoder"] = self._pool.place(item, name) + skipped * array.shape[-1]
        numbers = op.numbers
        factor = numbers.get("scale", numbers.get("factor", numbers.get("value", 0.0)))
        floats = np.array(
            [factor, numbers.get("bias", 0.0), numbers.get("threshold", 0.0)], np.float32
        )
        return kind, part.start, width, *starts, *floats.view(np.int32).tolist()

    def apply(self, site: str, layer: int, x: Tensor) -> None:
        """Change the rows of x, [rows, width], in place."""
        place = self._places.get((site, layer))
        if place is None:
            return
        change_rows[(len(x),)](
            x, self._starts.data, self._entries.data, self._ops.data,
            self._ops.data.view(torch.float32), self._vectors, place * (self._num_rows + 1),
            D=x.stride(0), BLOCK=min(_MAX_BLOCK, next_power_of_two(x.shape[1])), PDL=self._pdl,
            num_warps=4, launch_pdl=self._pdl,
        )  # fmt: skip


class StepHooks:
    """What a step changes, and then what it reads.

    Args:
        changes: Changes to the rows of its tokens.
        outputs: Changes to the rows whose logits are computed.
    """

    def __init__(
        self, changes: RowChanges, outputs: RowChanges, observer: LayerHooks | None
    ) -> None:
        self._changes, self._outputs, self._observer = changes, outputs, observer

    def wants(self, site: str, layer: int) -> bool:
        is_changed = (site, layer) in self._changes_at(site)
        return is_changed or (self._observer is not None and self._observer.wants(site, layer))

    def __call__(self, site: str, layer: int, x: Tensor) -> None:
        self._changes_at(site).apply(site, layer, x)
        if self._observer is not None and self._observer.wants(site, layer):
            self._observer(site, layer, x)

    def _changes_at(self, site: str) -> RowChanges:
        return self._outputs if site in OUTPUT_SITES else self._changes

    def on_queries(self, layer: int, qkv: Tensor) -> None:
        if self._observer is not None:
            self._observer.on_queries(layer, qkv)

    def recurrent_stats(self, layer: int, rows: int) -> Tensor | None:
        return None if self._observer is None else self._observer.recurrent_stats(layer, rows)
