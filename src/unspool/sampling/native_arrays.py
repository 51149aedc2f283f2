"""numpy's operations with the compiled kernels for float32 rows of a whole vocabulary.

What a kernel gives for a row depends on that row alone, so picks stay the same in any batch. Short
rows and float64 ones (the few candidates that remain after a truncation) are numpy's as ever.
"""

from __future__ import annotations

from ctypes import addressof, c_char, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np

from unspool import native
from unspool.sampling.arrays import Array, NumpyOperations

WIDE = 256  # below this, a call costs more than it spares
_FLOAT32 = np.dtype(np.float32)
_LOWEST = float(np.finfo(np.float32).min)


class NativeOperations(NumpyOperations):
    """For numpy, where the library was built."""

    def __init__(self) -> None:
        library = native.library()
        logits = (c_void_p, c_int64, c_int64)  # address, rows, width
        self._peaks = _function(library.unspool_peaks, *logits, c_void_p)
        self._measure = _function(library.unspool_measure, *logits, c_int32, c_void_p)
        self._counts = _function(library.unspool_counts, *logits, c_void_p)
        self._standing = _function(library.unspool_standing, *logits, c_void_p)
        self._leading = _function(library.unspool_leading, *logits, c_int64, c_void_p)
        self._above = _function(library.unspool_above, *logits, c_void_p, c_int64, c_void_p)
        self._tally = _function(library.unspool_tally, c_void_p, c_int64, c_int64, c_void_p)
        self._tally.restype = c_int64

    def amax(self, x: Array) -> Array:
        if not _suits(x):
            return super().amax(x)
        peaks = np.empty((len(x), 1))
        self._peaks(_address(x), *x.shape, _address(peaks))
        return peaks

    def measure(
        self, logits: Array, peak: Array | None, entropy: bool
    ) -> tuple[Array, Array, Array | None]:
        if not _suits(logits):
            return super().measure(logits, peak, entropy)
        found = np.empty((3, len(logits), 1))  # peaks, totals and entropies
        if peak is not None:
            found[0] = peak
        self._measure(_address(logits), *logits.shape, peak is not None, _address(found))
        return found[0], found[1], found[2]

    def standing(self, x: Array, tokens: Array) -> tuple[Array, Array]:
        if not _suits(x):
            return super().standing(x, tokens)
        found = np.empty((2, len(x)), np.int64)  # tokens in, their logits out; counts
        found[0] = tokens
        self._standing(_address(x), *x.shape, _address(found))
        return found[0].view(np.float64)[:, None], found[1]

    def leading(self, x: Array, count: int) -> tuple[Array, Array]:
        if not _suits(x):
            return super().leading(x, count)
        count = min(count, x.shape[1])
        found = np.empty((2, len(x), count))  # the values; and as whole numbers the columns
        self._leading(_address(x), *x.shape, count, _address(found))
        return found[0], found[1].view(np.int64)

    def above(self, x: Array, bound: Array) -> tuple[Array, Array]:
        if not _suits(x):
            return super().above(x, bound)
        limit = np.maximum(bound, _LOWEST)
        counts = np.empty((2, len(x)))  # levels in; counts out, as whole numbers
        counts[0] = limit[:, 0]
        self._counts(_address(x), *x.shape, _address(counts))
        room = max(1, int(counts[1].view(np.int64).max()))
        found = np.empty((2, len(x), room))
        self._above(_address(x), *x.shape, _address(limit), room, _address(found))
        return found[0], found[1].view(np.int64)

    def tally(self, tokens: Array, vocabulary: int) -> tuple[Array, Array]:
        if not tokens.size or not tokens.flags.c_contiguous:
            return super().tally(tokens, vocabulary)
        found = np.empty((2, tokens.size), np.int64)
        number = self._tally(_address(tokens), tokens.size, vocabulary, _address(found))
        return found[0, :number], found[1, :number]


def _function(function: Any, *arguments: Any) -> Any:
    function.argtypes, function.restype = arguments, None
    return function


def _suits(x: Array) -> bool:
    return bool(x.dtype == _FLOAT32 and x.shape[-1] >= WIDE and x.flags.c_contiguous)


def _address(x: Array) -> int:
    if x.flags.writeable:  # then there is a quicker way to ask
        return addressof(c_char.from_buffer(x))
    return int(x.ctypes.data)
