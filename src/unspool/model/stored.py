"""A tensor as its file has it: the packed bytes, and what they mean.

Backends take weights in this form, so that one that computes with packed numbers gets the very
blocks that the file holds. What loading has to do to a tensor is mostly moving whole rows (split
them, reorder them, stack them), and rows can be moved without unpacking them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.errors import ModelFileError
from unspool.model.block_types import unpacked
from unspool.model.float8 import float8_to_float32

FLOAT_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


def mapped(path: Path) -> mmap.mmap:
    """The bytes of a file, read when they are looked at."""
    try:
        with path.open("rb") as handle:
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:  # an empty file cannot be mapped
        raise ModelFileError(f"{path}: the file is empty; download it again") from error
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror or error})") from error


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Nothing is converted before it is asked for, and nothing copied if it can be avoided.

    `type` is F32, F16, BF16 or the name of a packed type (Q4_0, Q6_K, F8_E4M3, ...). `data` has
    float32, float16 or (for BF16) uint16 numbers in the tensor's shape; of a packed type it has
    uint8 [..., bytes of a row]. A packed tensor has at least two axes. `scales` are those of FP8
    numbers, [..., blocks of a row]. `factor` is what all numbers of an NVFP4 matrix are multiplied
    with at last: one number, or one for each matrix along the first axis of three.
    """

    type: str
    data: npt.NDArray[Any]
    shape: tuple[int, ...]
    scales: npt.NDArray[np.float32] | None = None
    factor: npt.NDArray[np.float32] | None = None

    @classmethod
    def of(cls, values: npt.NDArray[np.float32]) -> Stored:
        return cls("F32", values, values.shape)

    @property
    def packed(self) -> bool:
        return self.type not in FLOAT_TYPES

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)

    @property
    def sources(self) -> tuple[npt.NDArray[Any], ...]:
        """The arrays that view the file."""
        return (self.data,)

    def float32(self) -> npt.NDArray[np.float32]:
        """The numbers themselves: a view where they are stored so, else unpacked."""
        if self.type == "F32":
            return self.data
        if self.type == "F16":
            return self.data.astype(np.float32)
        if self.type == "BF16":  # the upper half of a float32
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        if self.scales is not None:
            return float8_to_float32(self.data, self.scales)
        values = unpacked(self.type, self.data).reshape(self.shape)
        return values if self.factor is None else values * self.factor[..., None, None]

    # -- moving rows: the same for packed and plain numbers ------------------------------------

    def rows(self, start: int, stop: int) -> Stored:
        """Some of the rows; a view."""
        data = self.data[start:stop]
        scales = None if self.scales is None else self.scales[start:stop]
        return Stored(self.type, data, (len(data), *self.shape[1:]), scales, self.factor)

    def inner_rows(self, start: int, stop: int) -> Stored:
        """Some of the rows of every matrix of a tensor with three axes; a view."""
        data = self.data[:, start:stop]
        scales = None if self.scales is None else self.scales[:, start:stop]
        shape = (self.shape[0], data.shape[1], self.shape[2])
        return Stored(self.type, data, shape, scales, self.factor)

    def reordered(self, order: npt.NDArray[np.int64]) -> Stored:
        """All rows, in another order."""
        scales = None if self.scales is None else self.scales[order]
        return Stored(self.type, self.data[order], self.shape, scales, self.factor)

    def every_second(self, first: int) -> Stored:
        """Every second row of each matrix along the first axis, from `first` on; a view."""
        data = self.data[:, first::2]
        scales = None if self.scales is None else self.scales[:, first::2]
        shape = (data.shape[0], data.shape[1], *self.shape[2:])
        return Stored(self.type, data, shape, scales, self.factor)

    def part(self, axis: int, index: npt.NDArray[np.int64]) -> Stored:
        """The given places along one axis. Along the last of a packed tensor they are unpacked, a
        matrix at a time."""
        if axis == len(self.shape) - 1 and self.packed:
            if axis == 2:
                return Stored.of(np.stack([one.part(1, index).data for one in self.slices()]))
            return Stored.of(np.ascontiguousarray(self.float32()[..., index]))
        together = bool(len(index)) and int(index[-1] - index[0]) == len(index) - 1
        taken = slice(int(index[0]), int(index[-1]) + 1) if together else index  # a view if it may
        where = (slice(None),) * axis + (taken,)
        shape = (*self.shape[:axis], len(index), *self.shape[axis + 1 :])
        scales = None if self.scales is None else self.scales[where]
        return Stored(self.type, self.data[where], shape, scales, self.factor)

    def slices(self) -> list[Stored]:
        """The tensors along the first axis; views."""
        count = len(self.data)
        scales = [None] * count if self.scales is None else list(self.scales)
        factors = [None] * count if self.factor is None else list(self.factor)
        return [
            Stored(self.type, data, self.shape[1:], of, factor)
            for data, of, factor in zip(self.data, scales, factors, strict=True)
        ]

    @staticmethod
    def stacked(parts: Sequence[Stored]) -> Stored:
        """Tensors of one shape, one above the other along a new first axis."""
        shapes = {part.shape for part in parts}
        if len(shapes) != 1:
            sizes = " and ".join(str(shape) for shape in sorted(shapes))
            raise ModelFileError(
                f"the matrices of the experts have different shapes, {sizes}; "
                "the checkpoint is damaged"
            )
        (shape,) = shapes
        if len({part.type for part in parts}) == 1:
            data = np.stack([part.data for part in parts])
            scales = [part.scales for part in parts if part.scales is not None]
            factors = [part.factor for part in parts if part.factor is not None]
            return Stored(
                parts[0].type,
                data,
                (len(parts), *shape),
                np.stack(scales) if scales else None,
                np.stack(factors) if factors else None,
            )
        return Stored.of(np.stack([part.float32() for part in parts]))

    # -- changes to single numbers: packed ones are unpacked -----------------------------------

    def transposed(self) -> Stored:
        """Rows and columns change places, in each matrix where there are several."""
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        if self.packed:
            return Stored.of(self.float32().swapaxes(-1, -2))
        return Stored(self.type, self.data.swapaxes(-1, -2), shape)

    def minus_one(self) -> Stored:
        return Stored.of(self.float32() - np.float32(1))
