"""Groups of whole numbers as other files have them, made into blocks when they are asked for.

A `Converted` moves its rows like any `Stored` and copies nothing while it does; its blocks are
built from the parts of the file that are left then, so that a large model is never in memory twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.model.block_types import GROUP, OWN_TYPES
from unspool.model.gguf import BLOCK_TYPES
from unspool.model.stored import Stored

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Parts = tuple[Array, ...]

_SIZES = {kind.name: (kind.elements, kind.size) for kind in BLOCK_TYPES.values()}
_SIZES |= {name: (GROUP, size) for name, size in OWN_TYPES.items()}


class Converted(Stored):
    """A packed tensor whose blocks are built from parts, all with the same first axes."""

    __slots__ = ("_build", "_parts")
    _build: Callable[..., Bytes]
    _parts: Parts

    def __init__(
        self, type: str, shape: tuple[int, ...], build: Callable[..., Bytes], parts: Parts,
        factor: npt.NDArray[np.float32] | None = None,
    ) -> None:  # fmt: skip
        known = {"type": type, "shape": shape, "scales": None, "factor": factor}
        for name, value in {**known, "_build": build, "_parts": parts}.items():
            object.__setattr__(self, name, value)

    @property
    def data(self) -> Bytes:
        """The blocks, [..., bytes of a row]; built anew each time."""
        return self._build(*self._parts)

    @property
    def nbytes(self) -> int:
        elements, size = _SIZES[self.type]
        return math.prod(self.shape) // elements * size

    @property
    def sources(self) -> Parts:
        return self._parts

    def _only(self, choose: Callable[[Array], Array], axes: int) -> Converted:
        """Some of the rows; `axes` of the shape may have become shorter."""
        parts = tuple(map(choose, self._parts))
        shape = (*parts[0].shape[:axes], *self.shape[axes:])
        return Converted(self.type, shape, self._build, parts, self.factor)

    def rows(self, start: int, stop: int) -> Stored:
        return self._only(lambda part: part[start:stop], 1)

    def reordered(self, order: npt.NDArray[np.int64]) -> Stored:
        return self._only(lambda part: part[order], 1)

    def every_second(self, first: int) -> Stored:
        return self._only(lambda part: part[:, first::2], 2)

    def slices(self) -> list[Stored]:
        factors = [None] * self.shape[0] if self.factor is None else list(self.factor)
        return [
            Converted(self.type, self.shape[1:], self._build, tuple(parts), factor)
            for *parts, factor in zip(*self._parts, factors, strict=True)
        ]

    @staticmethod
    def stacked(parts: Sequence[Stored]) -> Stored:
        """As for any other; of one type they stay apart until their blocks are asked for."""
        if len({(type(part), part.type, part.shape) for part in parts}) != 1:
            return Stored.stacked(parts)
        each = np.empty(len(parts), object)
        each[:] = parts
        factors = [part.factor for part in parts if part.factor is not None]
        shape = (len(parts), *parts[0].shape)
        factor = np.stack(factors) if factors else None
        return Converted(parts[0].type, shape, _blocks_of, (each,), factor)


def _blocks_of(parts: Array | Stored) -> Bytes:
    if isinstance(parts, Stored):
        return parts.data
    return np.stack([part.data for part in parts])


# -- blocks of 32 numbers -----------------------------------------------------------------------


def halves_apart(nibbles: Bytes) -> Bytes:
    """16 bytes with neighbours side by side, to 16 with the first half of 32 in the low bits."""
    front, back = nibbles[..., :8], nibbles[..., 8:]
    out = np.empty_like(nibbles)
    out[..., 0::2] = (front & 15) | (back << 4)
    out[..., 1::2] = (front >> 4) | (back & 240)
    return out


def as_bytes(numbers: Array, of_block: int) -> Bytes:
    """Packed numbers of any width as rows of blocks of so many bytes."""
    flat = np.ascontiguousarray(numbers).view(np.uint8)
    return flat.reshape(*numbers.shape[:-1], -1, of_block)


def build_mxfp4(blocks: Bytes, scales: Bytes) -> Bytes:
    joined = np.concatenate((scales[..., None], halves_apart(np.ascontiguousarray(blocks))), -1)
    return joined.reshape(*joined.shape[:-2], -1)


def build_nvfp4(numbers: Bytes, scales: Bytes) -> Bytes:
    """Blocks of 64: four scales, then 16 numbers each, the first eight in the low bits."""
    pairs = as_bytes(numbers, 8)
    front, back = pairs[..., :4], pairs[..., 4:]
    body = np.empty_like(pairs)
    body[..., 0::2] = (front & 15) | (back << 4)
    body[..., 1::2] = (front >> 4) | (back & 240)
    joined = np.concatenate((as_bytes(scales, 4), as_bytes(body.reshape(numbers.shape), 32)), -1)
    return joined.reshape(*joined.shape[:-2], -1)


def build_groups(bits: int, signed: int) -> Callable[..., Bytes]:
    """Blocks of a scale, what belongs to it (a zero point, a minimum or nothing), and numbers.

    `signed` is what is taken from 8-bit numbers first, as Q8_0 has them with their sign.
    """

    def build(numbers: Array, scales: Array, *lows: Array) -> Bytes:
        if bits == 4:
            body = halves_apart(as_bytes(numbers, GROUP // 2))
        else:
            body = as_bytes(numbers, GROUP) - np.uint8(signed)
        count = body.shape[-2]
        fields = [
            as_bytes(np.repeat(part, count // part.shape[-1], -1), part.dtype.itemsize)
            for part in (scales, *lows)
        ]
        joined = np.concatenate((*fields, body), -1)
        return joined.reshape(*joined.shape[:-2], -1)

    return build
