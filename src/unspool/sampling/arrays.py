"""The few operations that numpy and torch spell differently, or do best in different ways.

Stages are written once, with what both kinds of array share (operators, slices, `cumsum(-1)`), and
ask `operations(array)` (`operations.py`) for the rest. For numpy the compiled kernels do the work
over whole vocabularies where they are (`native_arrays.py`); what follows for numpy here does
without.

Every result for a row must be bit-identical whatever other rows are in the batch. Sums are where
this goes wrong, so there are two kinds: over a whole vocabulary (all rows equally wide: summed row
by row, in a fixed order), and over a few candidates padded to the widest row (`cumsum`, which adds
from left to right, so that zeros at the end change nothing).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = Any
"""A numpy array or a torch tensor: what the two share cannot be written as a type."""

LOWEST = -1.0e4
"""A difference of logits below which exp() is 0 in float32 and float64: stands in for -inf."""

_KEPT = {np.dtype(np.float32), np.dtype(np.float64)}
_SORT_WHOLE = 1024  # rows up to this width are sorted whole: quicker than looking for a bound


class NumpyOperations:
    """For numpy. Wide arrays are worked on row by row, so that a row stays in the cache."""

    def prepare(self, logits: Array) -> Array:
        """Logits as a contiguous float32 or float64 matrix."""
        if logits.dtype in _KEPT and logits.flags.c_contiguous:
            return logits
        dtype = logits.dtype if logits.dtype in _KEPT else np.float32
        return np.ascontiguousarray(logits, dtype=dtype)

    def exp(self, x: Array) -> Array:
        return np.exp(x)

    def log(self, x: Array) -> Array:
        return np.log(x)

    def where(self, mask: Array, a: Any, b: Any) -> Array:
        return np.where(mask, a, b)

    def minimum(self, a: Array, b: Array) -> Array:
        return np.minimum(a, b)

    def at_least(self, x: Array, floor: float) -> Array:
        return np.maximum(x, floor)

    def amax(self, x: Array) -> Array:
        return x.max(axis=-1, keepdims=True)

    def amin(self, x: Array) -> Array:
        return x.min(axis=-1, keepdims=True)

    def count(self, mask: Array) -> Array:
        if mask.shape[-1] < _SORT_WHOLE:
            return np.add.reduce(mask, axis=-1, dtype=np.int64)
        return np.array([np.count_nonzero(line) for line in mask])  # five times as quick

    def standing(self, x: Array, tokens: Array) -> tuple[Array, Array]:
        """Of one token a row (host numbers [rows]): its logit [rows, 1] in float64, and how many
        of the row lie above it [rows].
        """
        level = self.take(x, tokens[:, None])
        return self.double(level), self.count(x > level)

    def first_max(self, x: Array) -> Array:
        return x.argmax(axis=-1)

    def last_true(self, mask: Array) -> Array:
        return mask.shape[-1] - 1 - mask[:, ::-1].argmax(axis=-1)

    def columns(self, x: Array) -> Array:
        return np.arange(x.shape[-1])

    def ascending(self, x: Array) -> Array:
        return np.argsort(x, axis=-1, kind="stable")

    def take(self, x: Array, columns: Array) -> Array:
        if len(x) == 1:
            return x[0][columns]
        return x[np.arange(x.shape[0])[:, None], columns]

    def double(self, x: Array) -> Array:
        return x.astype(np.float64, copy=False)

    def like(self, values: Any, x: Array) -> Array:
        """An array as one of x's kind and place; floats take its type, whole numbers stay."""
        values = np.asarray(values)
        return values.astype(x.dtype, copy=False) if values.dtype.kind == "f" else values

    def copy(self, x: Array) -> Array:
        return x.copy()

    def host(self, x: Array) -> np.ndarray[Any, Any]:
        return np.asarray(x)

    def measure(
        self, logits: Array, peak: Array | None, entropy: bool
    ) -> tuple[Array, Array, Array | None]:
        """Over wide rows: the peak (where it was not given), Σ exp(x - peak), and where asked the
        entropy in nats; [rows, 1] each, in float64. Where the peak is not finite, nonsense.
        """
        rows, width = logits.shape
        peak = self.double(self.amax(logits)) if peak is None else peak
        total = np.empty((rows, 1))
        spread = np.empty((rows, 1)) if entropy else None
        below = np.empty(width, logits.dtype)
        weight = np.empty(width, logits.dtype)
        tops = peak.astype(logits.dtype)  # a float64 here would make the whole row float64
        for row in range(rows):
            np.subtract(logits[row], tops[row, 0], out=below)
            np.exp(below, out=weight)
            mass = float(np.add.reduce(weight))  # pairwise: good to 1e-7
            total[row] = mass
            if spread is not None:
                with np.errstate(invalid="ignore"):
                    np.multiply(weight, below, out=below)
                moment = float(np.add.reduce(below))
                if not math.isfinite(moment):  # a token at -inf: 0 times that is to be 0
                    moment = float(np.add.reduce(below, where=np.isfinite(below)))
                spread[row] = np.log(mass) - moment / mass
        return peak, total, spread

    def tally(self, tokens: Array, vocabulary: int) -> tuple[Array, Array]:
        """The tokens that occur and are in the vocabulary, each once, and how often they do."""
        known = tokens[(tokens >= 0) & (tokens < vocabulary)]
        found, counts = np.unique(known, return_counts=True)
        return found, counts

    def variance(self, x: Array, kept: Array) -> Array:
        """Population variance of each wide row's kept entries; [rows, 1]."""
        result = np.empty((x.shape[0], 1))
        for row in range(x.shape[0]):
            result[row] = x[row][kept[row]].astype(np.float64).var()
        return result

    def leading(self, x: Array, count: int) -> tuple[Array, Array]:
        """The `count` largest of each row, largest first, ties by column: values, columns.

        A whole sort is avoided by a bound: the maxima of many blocks are entries of the row, so
        at least `count` entries reach the count-th largest of these maxima. Few others do.
        Where too many are wanted for blocks, the row itself is partitioned.
        """
        rows, width = x.shape
        count = min(count, width)
        blocks = max(256, 4 * count)
        if width <= _SORT_WHOLE or 2 * count > width:
            columns = np.argsort(-x, axis=-1, kind="stable")[:, :count]
            return self.take(x, columns), columns
        values = np.empty((rows, count), x.dtype)
        found = np.empty((rows, count), np.int64)
        depth = width // blocks
        lowest = np.finfo(x.dtype).min
        for row in range(rows):
            line = x[row]
            tops = line
            if depth >= 4:
                tops = line[: depth * blocks].reshape(depth, blocks).max(axis=0)
            place = tops.size - count
            bound = max(np.partition(tops, place)[place], lowest)
            near = np.flatnonzero(line >= bound)
            if near.size < count:  # fewer are above -inf: the first of the others fill the row
                others = np.flatnonzero(line < bound)[: count - near.size]
                near = np.concatenate([near, others])
            high = line[near]
            order = np.argsort(-high, kind="stable")[:count]
            values[row], found[row] = high[order], near[order]
        return values, found

    def above(self, x: Array, bound: Array) -> tuple[Array, Array]:
        """The entries of each row that reach its bound, in order of column, padded to the widest.

        Values (-inf in the padding) and columns (0 there).
        """
        limit = np.maximum(bound.astype(x.dtype), np.finfo(x.dtype).min)
        near = [np.flatnonzero(line >= limit[row, 0]) for row, line in enumerate(x)]
        width = max(1, *(line.size for line in near)) if near else 1
        values = np.full((len(near), width), -np.inf, x.dtype)
        columns = np.zeros((len(near), width), np.int64)
        for row, line in enumerate(near):
            values[row, : line.size] = x[row][line]
            columns[row, : line.size] = line
        return values, columns


class TorchOperations:
    """For torch, on any device: every operation takes all rows at once."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def prepare(self, logits: Array) -> Array:
        logits = logits.detach()
        kept = logits.dtype in (self.torch.float32, self.torch.float64)
        return (logits if kept else logits.float()).contiguous()

    def exp(self, x: Array) -> Array:
        return self.torch.exp(x)

    def log(self, x: Array) -> Array:
        return self.torch.log(x)

    def where(self, mask: Array, a: Any, b: Any) -> Array:
        return self.torch.where(mask, a, b)

    def minimum(self, a: Array, b: Array) -> Array:
        return self.torch.minimum(a, b)

    def at_least(self, x: Array, floor: float) -> Array:
        return x.clamp(min=floor)

    def amax(self, x: Array) -> Array:
        return x.amax(-1, keepdim=True)

    def amin(self, x: Array) -> Array:
        return x.amin(-1, keepdim=True)

    def count(self, mask: Array) -> Array:
        return mask.sum(-1)

    def standing(self, x: Array, tokens: Array) -> tuple[Array, Array]:
        level = self.take(x, self.like(tokens, x)[:, None])
        return level.double(), (x > level).sum(-1)

    def first_max(self, x: Array) -> Array:
        return (x == x.amax(-1, keepdim=True)).to(self.torch.int8).argmax(-1)

    def last_true(self, mask: Array) -> Array:
        return mask.shape[-1] - 1 - mask.flip(-1).to(self.torch.int8).argmax(-1)

    def columns(self, x: Array) -> Array:
        return self.torch.arange(x.shape[-1], device=x.device)

    def ascending(self, x: Array) -> Array:
        return self.torch.argsort(x, dim=-1, stable=True)

    def take(self, x: Array, columns: Array) -> Array:
        return self.torch.take_along_dim(x, columns, dim=-1)

    def double(self, x: Array) -> Array:
        return x.double()

    def like(self, values: Any, x: Array) -> Array:
        if not isinstance(values, self.torch.Tensor):
            values = self.torch.from_numpy(np.array(values))
        tensor = values.to(x.device)
        return tensor.to(x.dtype) if tensor.is_floating_point() else tensor

    def copy(self, x: Array) -> Array:
        return x.clone()

    def host(self, x: Array) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = x.detach().cpu().numpy()
        return array

    def _row_sum(self, x: Array) -> Array:
        # Blocks of fixed length: torch splits one long sum between threads, but not these.
        padded = self.torch.nn.functional.pad(x, (0, -x.shape[-1] % 256))
        sums = padded.reshape(x.shape[0], -1, 256).sum(-1).double()
        return sums.cumsum(-1)[:, -1:]

    def measure(
        self, logits: Array, peak: Array | None, entropy: bool
    ) -> tuple[Array, Array, Array | None]:
        peak = self.amax(logits).double() if peak is None else peak
        below = (logits - peak.to(logits.dtype)).clamp(min=LOWEST)
        weight = self.torch.exp(below)
        total = self._row_sum(weight)
        if not entropy:
            return peak, total, None
        return peak, total, self.torch.log(total) - self._row_sum(weight * below) / total

    def variance(self, x: Array, kept: Array) -> Array:
        number = kept.sum(-1, keepdim=True)
        values = x.double()
        mean = self._row_sum(values.masked_fill(~kept, 0.0)) / number
        return self._row_sum(((values - mean) ** 2).masked_fill(~kept, 0.0)) / number

    def leading(self, x: Array, count: int) -> tuple[Array, Array]:
        torch = self.torch
        count = min(count, x.shape[-1])
        # topk breaks ties as it likes: take its last value, and of those equal to it the first.
        bound = torch.topk(x, count, dim=-1).values[:, -1:]
        higher, equal = x > bound, x == bound
        room = count - higher.sum(-1, keepdim=True)
        chosen = higher | (equal & (equal.cumsum(-1) <= room))
        columns = torch.nonzero(chosen, as_tuple=True)[1].reshape(x.shape[0], count)
        values = torch.take_along_dim(x, columns, dim=-1)
        order = torch.argsort(-values, dim=-1, stable=True)
        return (
            torch.take_along_dim(values, order, dim=-1),
            torch.take_along_dim(columns, order, dim=-1),
        )

    def above(self, x: Array, bound: Array) -> tuple[Array, Array]:
        torch = self.torch
        limit = bound.to(x.dtype).clamp(min=torch.finfo(x.dtype).min)
        mask = x >= limit
        width = max(1, int(mask.sum(-1).max()))
        place = mask.cumsum(-1) - 1
        row, column = torch.nonzero(mask, as_tuple=True)
        values = torch.full((x.shape[0], width), -torch.inf, dtype=x.dtype, device=x.device)
        columns = torch.zeros((x.shape[0], width), dtype=torch.int64, device=x.device)
        values[row, place[row, column]] = x[row, column]
        columns[row, place[row, column]] = column
        return values, columns
