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
class _Encoded:
    """An intervention as the kernel reads it."""

    places: Ints  # where each operation is applied
    ops: npt.NDArray[np.int32]  # [operations, 8], see `change_rows`
    stride: int  # numbers from the vector of a token to that of the next one


_OP_VECTOR = 3  # field of an operation: where its vector is
_MAX_ENCODED = 4096


class RowChanges:
    """The operations on each row of a step, at each site."""

    def __init__(self, config: ModelConfig, pool: VectorPool, *, pdl: bool) -> None:
        device = pool.data.device
        self._config, self._pool, self._pdl = config, pool, pdl
        self._starts, self._entries, self._ops = (_Buffer(device) for _ in range(3))
        self._places: dict[tuple[str, int], int] = {}
        self._encoded: dict[str, _Encoded] = {}  # by digest; of these places and this pool
        self._num_rows = 0
        self._vectors = pool.data
        self._num_resets = 0
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
        if current == self._current and self._pool.num_resets == self._num_resets:
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
            entries[:, 0] * (num_rows + 1) + entries[:, 1] + 1,
            minlength=len(self._places) * (num_rows + 1),
        )
        for buffer, values in (
            (self._starts, np.cumsum(lists)), (self._entries, entries[:, 2]), (self._ops, ops),
        ):  # fmt: skip
            has_moved |= buffer.fill(values.astype(np.int32, copy=False).ravel())
        self._current = current
        return has_moved

    def _set_places(self, sites: frozenset[str]) -> None:
        """Number the places of these sites in all layers, so that a graph serves any layers."""
        is_known = sites == self.sites and self._num_resets == self._pool.num_resets
        if is_known and self._places and len(self._encoded) < _MAX_ENCODED:
            return
        places = {
            place_of(site, layer): None
            for site in sorted(sites)
            for layer in site_layers(self._config, site)
        }
        self.sites, self._places = sites, {place: number for number, place in enumerate(places)}
        self._encoded, self._num_resets = {}, self._pool.num_resets

    def _build(
        self, table: tuple[Intervention, ...], rows: Ints, numbers: Ints, offsets: Ints
    ) -> tuple[Ints, npt.NDArray[np.int32]]:
        """The operations, and entries [n, 3]: which operation (2) changes which row (1) where (0),
        in the order in which they are applied."""
        ops, num_ops = [np.empty((0, 8), np.int32)], 0
        parts = [np.empty((0, 4), np.int64)]  # place, row, operation, order
        by_number = np.argsort(numbers, kind="stable")
        borders = np.flatnonzero(np.diff(numbers[by_number])) + 1
        for touched in np.split(by_number, borders) if len(numbers) else ():
            item = table[numbers[touched[0]]]
            encoded = self._encode(item)
            # Tokens that have a vector of their own have operations of their own.
            distinct, which = np.unique(offsets[touched], return_inverse=True)
            shifted = np.repeat(encoded.ops[None], len(distinct), 0)
            shifted[:, :, _OP_VECTOR] += (distinct * encoded.stride).astype(np.int32)[:, None]
            size = len(encoded.ops)
            part = np.empty((len(touched), size, 4), np.int64)
            part[:, :, 0] = encoded.places
            part[:, :, 1] = rows[touched, None]
            part[:, :, 2] = num_ops + which[:, None] * size + np.arange(size)
            part[:, :, 3] = touched[:, None]
            parts.append(part.reshape(-1, 4))
            ops.append(shifted.reshape(-1, 8))
            num_ops += len(distinct) * size
        entries = np.concatenate(parts)
        order = np.lexsort((entries[:, 3], entries[:, 1], entries[:, 0]))
        return entries[order, :3], np.concatenate(ops)

    def _encode(self, item: Intervention) -> _Encoded:
        """The operations of an intervention, with the vectors of its first token."""
        encoded = self._encoded.get(item.digest)
        if encoded is None:
            places, ops, stride = [], [], 0
            for index, layer in item.resolve_layers(self._config):
                place = self._places[place_of(item.site, layer)]
                for part in item.slices(self._config, layer):
                    places.append(place)
                    ops.append(self._encode_op(item, index, part))
            if item.num_tokens:
                stride = next(iter(item.op.arrays.values())).shape[-1]
            fields = np.array(ops, np.int32).reshape(-1, 8)
            encoded = _Encoded(np.array(places, np.int64), fields, stride)
            self._encoded[item.digest] = encoded
        return encoded

    def _encode_op(self, item: Intervention, index: int, part: slice) -> tuple[int, ...]:
        """The fields of an operation: kind, columns, arrays, numbers; see `change_rows`."""
        op, width = item.op, part.stop - part.start
        kind = CHANGE_KINDS.get(op.kind, CHANGE_ADD)
        starts = [0, 0]
        for name, array in op.arrays.items():
            layer = min(index, len(array) - 1) if array.ndim > 1 else 0
            skipped = layer * (array.shape[1] if array.ndim == 3 else 1) * array.shape[-1]
            starts[name == "encoder"] = self._pool.place(item, name) + skipped
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
