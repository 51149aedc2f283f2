"""Array operations that differ between numpy, torch and the compiled library.

Stages are written once: they use what numpy arrays and torch tensors share (operators, slices,
`cumsum(-1)`), and `operations(array)` for the rest. For numpy, the compiled kernels work on whole
vocabularies if the library is there (`NativeOperations`); `NumpyOperations` is the fallback.

A row's result must be bit-identical in any batch. Sums are the critical part, so there are two
kinds: over a whole vocabulary (all rows equally wide: summed row by row, in a fixed order), and
over a few candidates padded to the widest row (`cumsum`, which adds from left to right, so trailing
zeros change nothing).
"""

from __future__ import annotations

import math
from ctypes import addressof, c_char, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np

from unspool import native

Array = Any
"""A numpy array or a torch tensor: Python has no type for what both share."""

LOWEST = -1.0e4
"""Replaces -inf: exp() of it is 0 in float32 and float64."""

_FLOAT_TYPES = {np.dtype(np.float32), np.dtype(np.float64)}
_MAX_SORT_WIDTH = 1024  # rows up to this width are sorted: faster than partitioning


class NumpyOperations:
    """Operations on numpy arrays. Wide arrays are processed row by row: a row fits the cache."""

    def prepare(self, logits: Array) -> Array:
        """Logits as a contiguous float32 or float64 matrix."""
        if logits.dtype in _FLOAT_TYPES and logits.flags.c_contiguous:
            return logits
        dtype = logits.dtype if logits.dtype in _FLOAT_TYPES else np.float32
        return np.ascontiguousarray(logits, dtype=dtype)

    def exp(self, x: Array) -> Array:
        return np.exp(x)

    def log(self, x: Array) -> Array:
        return np.log(x)

    def where(self, mask: Array, a: Any, b: Any) -> Array:
        return np.where(mask, a, b)

    def minimum(self, a: Array, b: Array) -> Array:
        return np.minimum(a, b)

    def clamp_min(self, x: Array, floor: float) -> Array:
        return np.maximum(x, floor)

    def amax(self, x: Array) -> Array:
        return x.max(axis=-1, keepdims=True)

    def amin(self, x: Array) -> Array:
        return x.min(axis=-1, keepdims=True)

    def count(self, mask: Array) -> Array:
        if mask.shape[-1] < _MAX_SORT_WIDTH:
            return np.add.reduce(mask, axis=-1, dtype=np.int64)
        return np.array([np.count_nonzero(row_values) for row_values in mask])  # five times as fast

    def logit_and_rank(self, x: Array, tokens: Array) -> tuple[Array, Array]:
        """Logit [rows, 1] in float64 of one token per row, and its rank [rows] (0: highest)."""
        logit = self.take_columns(x, tokens[:, None])
        return self.to_float64(logit), self.count(x > logit)

    def first_max(self, x: Array) -> Array:
        return x.argmax(axis=-1)

    def last_true(self, mask: Array) -> Array:
        return mask.shape[-1] - 1 - mask[:, ::-1].argmax(axis=-1)

    def column_index(self, x: Array) -> Array:
        return np.arange(x.shape[-1])

    def argsort_rows(self, x: Array) -> Array:
        return np.argsort(x, axis=-1, kind="stable")

    def take_columns(self, x: Array, columns: Array) -> Array:
        if len(x) == 1:
            return x[0][columns]
        return x[np.arange(x.shape[0])[:, None], columns]

    def to_float64(self, x: Array) -> Array:
        return x.astype(np.float64, copy=False)

    def to_array_like(self, values: Any, x: Array) -> Array:
        """Convert to the kind and device of x; floats also to its dtype, integers keep theirs."""
        values = np.asarray(values)
        return values.astype(x.dtype, copy=False) if values.dtype.kind == "f" else values

    def copy(self, x: Array) -> Array:
        return x.copy()

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        return np.asarray(x)

    def softmax_stats(
        self, logits: Array, peak: Array | None, entropy: bool
    ) -> tuple[Array, Array, Array | None]:
        """Statistics of wide rows: peak, Σ exp(x - peak) and, if requested, entropy in nats.

        Each [rows, 1] in float64. Meaningless where the peak is not finite.
        """
        rows, width = logits.shape
        peak = self.to_float64(self.amax(logits)) if peak is None else peak
        total = np.empty((rows, 1))
        entropies = np.empty((rows, 1)) if entropy else None
        shifted = np.empty(width, logits.dtype)
        exp_shifted = np.empty(width, logits.dtype)
        maxima = peak.astype(logits.dtype)  # a float64 would convert the row to float64
        for row in range(rows):
            np.subtract(logits[row], maxima[row, 0], out=shifted)
            np.exp(shifted, out=exp_shifted)
            mass = float(np.add.reduce(exp_shifted))  # pairwise: good to 1e-7
            total[row] = mass
            if entropies is not None:
                with np.errstate(invalid="ignore"):
                    np.multiply(exp_shifted, shifted, out=shifted)
                moment = float(np.add.reduce(shifted))
                if not math.isfinite(moment):  # 0 * -inf counts as 0
                    moment = float(np.add.reduce(shifted, where=np.isfinite(shifted)))
                entropies[row] = np.log(mass) - moment / mass
        return peak, total, entropies

    def count_tokens(self, tokens: Array, vocabulary: int) -> tuple[Array, Array]:
        """Distinct tokens that are in the vocabulary, and their counts."""
        valid = tokens[(tokens >= 0) & (tokens < vocabulary)]
        unique, counts = np.unique(valid, return_counts=True)
        return unique, counts

    def variance(self, x: Array, mask: Array) -> Array:
        """Population variance of each row's entries where `mask` is set; [rows, 1]."""
        result = np.empty((x.shape[0], 1))
        for row in range(x.shape[0]):
            result[row] = x[row][mask[row]].astype(np.float64).var()
        return result

    def largest(self, x: Array, count: int) -> tuple[Array, Array]:
        """The `count` largest of each row, largest first, ties by column: values, columns.

        A lower bound avoids sorting the row: block maxima are entries of the row, so at least
        `count` entries reach the count-th largest block maximum, and few others do. If `count` is
        too large for blocks, the row itself is partitioned.
        """
        rows, width = x.shape
        count = min(count, width)
        blocks = max(256, 4 * count)
        if width <= _MAX_SORT_WIDTH or 2 * count > width:
            columns = np.argsort(-x, axis=-1, kind="stable")[:, :count]
            return self.take_columns(x, columns), columns
        values = np.empty((rows, count), x.dtype)
        unique = np.empty((rows, count), np.int64)
        depth = width // blocks
        lowest = np.finfo(x.dtype).min
        for row in range(rows):
            row_values = x[row]
            maxima = row_values
            if depth >= 4:
                maxima = row_values[: depth * blocks].reshape(depth, blocks).max(axis=0)
            position = maxima.size - count
            bound = max(np.partition(maxima, position)[position], lowest)
            indices = np.flatnonzero(row_values >= bound)
            if indices.size < count:  # fewer are above -inf: fill up with the first others
                others = np.flatnonzero(row_values < bound)[: count - indices.size]
                indices = np.concatenate([indices, others])
            high = row_values[indices]
            order = np.argsort(-high, kind="stable")[:count]
            values[row], unique[row] = high[order], indices[order]
        return values, unique

    def at_or_above(self, x: Array, bound: Array) -> tuple[Array, Array]:
        """Entries of each row >= its bound, by column: values and columns.

        Padded to the widest row with -inf and column 0.
        """
        limit = np.maximum(bound.astype(x.dtype), np.finfo(x.dtype).min)
        indices = [np.flatnonzero(row_values >= limit[row, 0]) for row, row_values in enumerate(x)]
        width = max(1, *(row_values.size for row_values in indices)) if indices else 1
        values = np.full((len(indices), width), -np.inf, x.dtype)
        columns = np.zeros((len(indices), width), np.int64)
        for row, row_values in enumerate(indices):
            values[row, : row_values.size] = x[row][row_values]
            columns[row, : row_values.size] = row_values
        return values, columns


class TorchOperations:
    """Operations on torch tensors on any device, all rows together."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def prepare(self, logits: Array) -> Array:
        logits = logits.detach()
        is_float = logits.dtype in (self.torch.float32, self.torch.float64)
        return (logits if is_float else logits.float()).contiguous()

    def exp(self, x: Array) -> Array:
        return self.torch.exp(x)

    def log(self, x: Array) -> Array:
        return self.torch.log(x)

    def where(self, mask: Array, a: Any, b: Any) -> Array:
        return self.torch.where(mask, a, b)

    def minimum(self, a: Array, b: Array) -> Array:
        return self.torch.minimum(a, b)

    def clamp_min(self, x: Array, floor: float) -> Array:
        return x.clamp(min=floor)

    def amax(self, x: Array) -> Array:
        return x.amax(-1, keepdim=True)

    def amin(self, x: Array) -> Array:
        return x.amin(-1, keepdim=True)

    def count(self, mask: Array) -> Array:
        return mask.sum(-1)

    def logit_and_rank(self, x: Array, tokens: Array) -> tuple[Array, Array]:
        logit = self.take_columns(x, self.to_array_like(tokens, x)[:, None])
        return logit.double(), (x > logit).sum(-1)

    def first_max(self, x: Array) -> Array:
        return (x == x.amax(-1, keepdim=True)).to(self.torch.int8).argmax(-1)

    def last_true(self, mask: Array) -> Array:
        return mask.shape[-1] - 1 - mask.flip(-1).to(self.torch.int8).argmax(-1)

    def column_index(self, x: Array) -> Array:
        return self.torch.arange(x.shape[-1], device=x.device)

    def argsort_rows(self, x: Array) -> Array:
        return self.torch.argsort(x, dim=-1, stable=True)

    def take_columns(self, x: Array, columns: Array) -> Array:
        return self.torch.take_along_dim(x, columns, dim=-1)

    def to_float64(self, x: Array) -> Array:
        return x.double()

    def to_array_like(self, values: Any, x: Array) -> Array:
        if not isinstance(values, self.torch.Tensor):
            values = self.torch.from_numpy(np.array(values))
        tensor = values.to(x.device)
        return tensor.to(x.dtype) if tensor.is_floating_point() else tensor

    def copy(self, x: Array) -> Array:
        return x.clone()

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = x.detach().cpu().numpy()
        return array

    def _row_sum(self, x: Array) -> Array:
        # Blocks of fixed length: torch splits a long sum between threads, but not these.
        padded = self.torch.nn.functional.pad(x, (0, -x.shape[-1] % 256))
        sums = padded.reshape(x.shape[0], -1, 256).sum(-1).double()
        return sums.cumsum(-1)[:, -1:]

    def softmax_stats(
        self, logits: Array, peak: Array | None, entropy: bool
    ) -> tuple[Array, Array, Array | None]:
        peak = self.amax(logits).double() if peak is None else peak
        shifted = (logits - peak.to(logits.dtype)).clamp(min=LOWEST)
        exp_shifted = self.torch.exp(shifted)
        total = self._row_sum(exp_shifted)
        if not entropy:
            return peak, total, None
        return peak, total, self.torch.log(total) - self._row_sum(exp_shifted * shifted) / total

    def variance(self, x: Array, mask: Array) -> Array:
        number = mask.sum(-1, keepdim=True)
        values = x.double()
        mean = self._row_sum(values.masked_fill(~mask, 0.0)) / number
        return self._row_sum(((values - mean) ** 2).masked_fill(~mask, 0.0)) / number

    def largest(self, x: Array, count: int) -> tuple[Array, Array]:
        torch = self.torch
        count = min(count, x.shape[-1])
        # The order of ties in topk is undefined: use its last value, and take the first equals.
        bound = torch.topk(x, count, dim=-1).values[:, -1:]
        higher, equal = x > bound, x == bound
        num_ties = count - higher.sum(-1, keepdim=True)
        is_selected = higher | (equal & (equal.cumsum(-1) <= num_ties))
        columns = torch.nonzero(is_selected, as_tuple=True)[1].reshape(x.shape[0], count)
        values = torch.take_along_dim(x, columns, dim=-1)
        order = torch.argsort(-values, dim=-1, stable=True)
        return (
            torch.take_along_dim(values, order, dim=-1),
            torch.take_along_dim(columns, order, dim=-1),
        )

    def at_or_above(self, x: Array, bound: Array) -> tuple[Array, Array]:
        torch = self.torch
        limit = bound.to(x.dtype).clamp(min=torch.finfo(x.dtype).min)
        mask = x >= limit
        width = max(1, int(mask.sum(-1).max()))
        position = mask.cumsum(-1) - 1
        row, column = torch.nonzero(mask, as_tuple=True)
        values = torch.full((x.shape[0], width), -torch.inf, dtype=x.dtype, device=x.device)
        columns = torch.zeros((x.shape[0], width), dtype=torch.int64, device=x.device)
        values[row, position[row, column]] = x[row, column]
        columns[row, position[row, column]] = column
        return values, columns


MIN_NATIVE_WIDTH = 256  # narrower rows: the call costs more than it saves
_FLOAT32 = np.dtype(np.float32)
_FLOAT32_MIN = float(np.finfo(np.float32).min)


class NativeOperations(NumpyOperations):
    """Operations on numpy arrays with the compiled library."""

    def __init__(self) -> None:
        library = native.library()
        logits = (c_void_p, c_int64, c_int64)  # address, rows, width
        self._native_peaks = _declare(library.unspool_peaks, *logits, c_void_p)
        self._native_stats = _declare(library.unspool_measure, *logits, c_int32, c_void_p)
        self._native_counts = _declare(library.unspool_counts, *logits, c_void_p)
        self._native_rank = _declare(library.unspool_standing, *logits, c_void_p)
        self._native_largest = _declare(library.unspool_leading, *logits, c_int64, c_void_p)
        self._native_above = _declare(library.unspool_above, *logits, c_void_p, c_int64, c_void_p)
        self._native_count = _declare(library.unspool_tally, c_void_p, c_int64, c_int64, c_void_p)
        self._native_count.restype = c_int64

    def exp(self, x: Array) -> Array:
        return native.exp(x).astype(x.dtype, copy=False)

    def log(self, x: Array) -> Array:
        return native.log(x).astype(x.dtype, copy=False)

    def amax(self, x: Array) -> Array:
        if not _is_native(x):
            return super().amax(x)
        peaks = np.empty((len(x), 1))
        self._native_peaks(_address(x), *x.shape, _address(peaks))
        return peaks

    def softmax_stats(
        self, logits: Array, peak: Array | None, entropy: bool
    ) -> tuple[Array, Array, Array | None]:
        if not _is_native(logits, min_width=1):  # numpy's bits depend on the processor
            return super().softmax_stats(logits, peak, entropy)
        result = np.empty((3, len(logits), 1))  # peaks, totals and entropies
        if peak is not None:
            result[0] = peak
        self._native_stats(_address(logits), *logits.shape, peak is not None, _address(result))
        return result[0], result[1], result[2]

    def logit_and_rank(self, x: Array, tokens: Array) -> tuple[Array, Array]:
        if not _is_native(x):
            return super().logit_and_rank(x, tokens)
        result = np.empty((2, len(x)), np.int64)  # in: tokens; out: their logits, ranks
        result[0] = tokens
        self._native_rank(_address(x), *x.shape, _address(result))
        return result[0].view(np.float64)[:, None], result[1]

    def largest(self, x: Array, count: int) -> tuple[Array, Array]:
        if not _is_native(x):
            return super().largest(x, count)
        count = min(count, x.shape[1])
        result = np.empty((2, len(x), count))  # values; columns as int64
        self._native_largest(_address(x), *x.shape, count, _address(result))
        return result[0], result[1].view(np.int64)

    def at_or_above(self, x: Array, bound: Array) -> tuple[Array, Array]:
        if not _is_native(x):
            return super().at_or_above(x, bound)
        bounds = np.maximum(bound, _FLOAT32_MIN)
        counts = np.empty((2, len(x)))  # in: bounds; out: counts as int64
        counts[0] = bounds[:, 0]
        self._native_counts(_address(x), *x.shape, _address(counts))
        width = max(1, int(counts[1].view(np.int64).max()))
        result = np.empty((2, len(x), width))
        self._native_above(_address(x), *x.shape, _address(bounds), width, _address(result))
        return result[0], result[1].view(np.int64)

    def count_tokens(self, tokens: Array, vocabulary: int) -> tuple[Array, Array]:
        if not tokens.size or not tokens.flags.c_contiguous:
            return super().count_tokens(tokens, vocabulary)
        result = np.empty((2, tokens.size), np.int64)
        count = self._native_count(_address(tokens), tokens.size, vocabulary, _address(result))
        return result[0, :count], result[1, :count]


def _declare(function: Any, *arguments: Any) -> Any:
    function.argtypes, function.restype = arguments, None
    return function


def _is_native(x: Array, min_width: int = MIN_NATIVE_WIDTH) -> bool:
    return bool(x.dtype == _FLOAT32 and x.shape[-1] >= min_width and x.flags.c_contiguous)


def _address(x: Array) -> int:
    if x.flags.writeable:  # faster than x.ctypes
        return addressof(c_char.from_buffer(x))
    return int(x.ctypes.data)


# -- The operations for an array. Imports torch only for its tensors

Operations = NumpyOperations | TorchOperations

_numpy: NumpyOperations | None = None
_torch: TorchOperations | None = None


def array_operations(array: Array) -> Operations:
    """Operations for a numpy array or a torch tensor."""
    global _torch
    if isinstance(array, np.ndarray):
        return numpy_operations()
    if hasattr(array, "detach"):  # a tensor
        if _torch is None:
            import torch

            _torch = TorchOperations(torch)
        return _torch
    raise TypeError(f"logits must be a numpy array or a torch tensor, not {type(array).__name__}")


def numpy_operations() -> NumpyOperations:
    """Operations for numpy, with the compiled library if it is there."""
    global _numpy
    if _numpy is None:
        _numpy = NativeOperations() if native.missing_reason() is None else NumpyOperations()
    return _numpy
