"""numpy operations with compiled kernels for float32 rows of a whole vocabulary.

A kernel's result for a row depends on that row only, so picks are the same in any batch. Short rows
and float64 rows (the few candidates that remain after truncation) are left to numpy.
"""

from __future__ import annotations

from ctypes import addressof, c_char, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np

from unspool import native
from unspool.sampling.arrays import Array, NumpyOperations

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

    def amax(self, x: Array) -> Array:
        if not _is_native(x):
            return super().amax(x)
        peaks = np.empty((len(x), 1))
        self._native_peaks(_address(x), *x.shape, _address(peaks))
        return peaks

    def softmax_stats(
        self, logits: Array, peak: Array | None, entropy: bool
    ) -> tuple[Array, Array, Array | None]:
        if not _is_native(logits):
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


def _is_native(x: Array) -> bool:
    return bool(x.dtype == _FLOAT32 and x.shape[-1] >= MIN_NATIVE_WIDTH and x.flags.c_contiguous)


def _address(x: Array) -> int:
    if x.flags.writeable:  # faster than x.ctypes
        return addressof(c_char.from_buffer(x))
    return int(x.ctypes.data)
