"""Quantized tensors of safetensors files, repacked into blocks on demand.

A `ConvertedTensor` slices and permutes rows without copying, like any `Stored`; its blocks are
built when they are read, so a large model is never in memory twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.model.block_types import GROUP, UNSPOOL_BLOCK_BYTES
from unspool.model.gguf import BLOCK_TYPES
from unspool.model.stored import FileTensor

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Parts = tuple[Array, ...]

_SIZES = {kind.name: (kind.elements, kind.size) for kind in BLOCK_TYPES.values()}
_SIZES |= {name: (GROUP, size) for name, size in UNSPOOL_BLOCK_BYTES.items()}


class ConvertedTensor(FileTensor):
    """A packed tensor whose blocks are built from parts that share their first axes."""

    __slots__ = ("_build", "_parts")
    _build: Callable[..., Bytes]
    _parts: Parts

    def __init__(
        self, type: str, shape: tuple[int, ...], build: Callable[..., Bytes], parts: Parts,
        factor: npt.NDArray[np.float32] | None = None,
    ) -> None:  # fmt: skip
        fields = {"type": type, "shape": shape, "scales": None, "factor": factor}
        for name, value in {**fields, "_build": build, "_parts": parts}.items():
            object.__setattr__(self, name, value)

    @property
    def data(self) -> Bytes:
        """The blocks, [..., bytes of a row]; built at each access."""
        return self._build(*self._parts)

    @property
    def nbytes(self) -> int:
        elements, size = _SIZES[self.type]
        return math.prod(self.shape) // elements * size

    @property
    def sources(self) -> Parts:
        return self._parts

    def _only(self, choose: Callable[[Array], Array], axes: int) -> ConvertedTensor:
        """Select rows; the first `axes` axes of the shape may change."""
        parts = tuple(map(choose, self._parts))
        shape = (*parts[0].shape[:axes], *self.shape[axes:])
        return ConvertedTensor(self.type, shape, self._build, parts, self.factor)

    def rows(self, start: int, stop: int) -> FileTensor:
        return self._only(lambda part: part[start:stop], 1)

    def reordered(self, order: npt.NDArray[np.int64]) -> FileTensor:
        return self._only(lambda part: part[order], 1)

    def every_second(self, first: int) -> FileTensor:
        return self._only(lambda part: part[:, first::2], 2)

    def slices(self) -> list[FileTensor]:
        factors = [None] * self.shape[0] if self.factor is None else list(self.factor)
        return [
            ConvertedTensor(self.type, self.shape[1:], self._build, tuple(parts), factor)
            for *parts, factor in zip(*self._parts, factors, strict=True)
        ]

    @staticmethod
    def stacked(parts: Sequence[FileTensor]) -> FileTensor:
        """Stack tensors; those of one type are not built before their blocks are read."""
        if len({(type(part), part.type, part.shape) for part in parts}) != 1:
            return FileTensor.stacked(parts)
        tensors = np.empty(len(parts), object)
        tensors[:] = parts
        factors = [part.factor for part in parts if part.factor is not None]
        shape = (len(parts), *parts[0].shape)
        factor = np.stack(factors) if factors else None
        return ConvertedTensor(parts[0].type, shape, _blocks_of, (tensors,), factor)


def _blocks_of(parts: Array | FileTensor) -> Bytes:
    if isinstance(parts, FileTensor):
        return parts.data
    return np.stack([part.data for part in parts])


# -- blocks of 32 numbers -----------------------------------------------------------------------


def split_nibble_halves(nibbles: Bytes) -> Bytes:
    """Repack 16 bytes of adjacent nibble pairs: the first 16 numbers become the low nibbles."""
    front, back = nibbles[..., :8], nibbles[..., 8:]
    out = np.empty_like(nibbles)
    out[..., 0::2] = (front & 15) | (back << 4)
    out[..., 1::2] = (front >> 4) | (back & 240)
    return out


def view_as_blocks(numbers: Array, of_block: int) -> Bytes:
    """View packed numbers as [..., blocks, block_bytes]."""
    flat = np.ascontiguousarray(numbers).view(np.uint8)
    return flat.reshape(*numbers.shape[:-1], -1, of_block)


def build_mxfp4(blocks: Bytes, scales: Bytes) -> Bytes:
    joined = np.concatenate(
        (scales[..., None], split_nibble_halves(np.ascontiguousarray(blocks))), -1
    )
    return joined.reshape(*joined.shape[:-2], -1)


def build_nvfp4(numbers: Bytes, scales: Bytes) -> Bytes:
    """Blocks of 64: four scales, then four groups of 16, the first eight as low nibbles."""
    pairs = view_as_blocks(numbers, 8)
    front, back = pairs[..., :4], pairs[..., 4:]
    body = np.empty_like(pairs)
    body[..., 0::2] = (front & 15) | (back << 4)
    body[..., 1::2] = (front >> 4) | (back & 240)
    joined = np.concatenate(
        (view_as_blocks(scales, 4), view_as_blocks(body.reshape(numbers.shape), 32)), -1
    )
    return joined.reshape(*joined.shape[:-2], -1)


def build_groups(bits: int, signed: int) -> Callable[..., Bytes]:
    """Builder of blocks: a scale, an optional zero point or minimum, and the numbers.

    Args:
        signed: Subtracted from 8-bit numbers, because Q8_0 is signed.
    """

    def build(numbers: Array, scales: Array, *lows: Array) -> Bytes:
        if bits == 4:
            body = split_nibble_halves(view_as_blocks(numbers, GROUP // 2))
        else:
            body = view_as_blocks(numbers, GROUP) - np.uint8(signed)
        count = body.shape[-2]
        fields = [
            view_as_blocks(np.repeat(part, count // part.shape[-1], -1), part.dtype.itemsize)
            for part in (scales, *lows)
        ]
        joined = np.concatenate((*fields, body), -1)
        return joined.reshape(*joined.shape[:-2], -1)

    return build
