"""A tensor in the format of its file: packed bytes, type and shape.

Backends take weights in this form, so one that computes with packed blocks gets those of the file.
Loading mostly splits, permutes and stacks rows, which needs no dequantization.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.errors import ModelFileError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

GROUP = 32
UNSPOOL_BLOCK_BYTES = {"ZERO4": 19, "ZERO8": 35, "AFFINE8": 36}  # bytes of a block


def dequantize_blocks(type: str, data: Bytes) -> Floats:
    """Dequantize rows of blocks to [..., columns]."""
    if type in UNSPOOL_BLOCK_BYTES:
        return _dequantize_unspool(type, data)
    if type == "Q1_0":
        return _dequantize_q1(data)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values: Floats = dequantize(data, GGMLQuantizationType[type])
    return values


def _dequantize_unspool(type: str, data: Bytes) -> Floats:
    blocks = data.reshape(-1, UNSPOOL_BLOCK_BYTES[type])
    scale, minimum = _halves(blocks, 0), np.zeros((1, 1), np.float32)
    if type == "AFFINE8":
        numbers, minimum = blocks[:, 4:], _halves(blocks, 2)
    else:
        zero, numbers = blocks[:, 2:3].astype(np.float32), blocks[:, 3:]
        minimum = -(scale * zero)
        if type == "ZERO4":
            numbers = np.concatenate((numbers & 15, numbers >> 4), -1)
    values = scale * numbers.astype(np.float32) + minimum
    return values.reshape(*data.shape[:-1], -1)


def _dequantize_q1(data: Bytes) -> Floats:
    """128 numbers in 18 bytes: a scale and sign bits (1: positive)."""
    blocks = data.reshape(-1, 18)
    plus = np.unpackbits(np.ascontiguousarray(blocks[:, 2:]), axis=-1, bitorder="little")
    values = _halves(blocks, 0) * np.where(plus, np.float32(1), np.float32(-1))
    return values.reshape(*data.shape[:-1], -1)


def _halves(blocks: Bytes, start: int) -> Floats:
    values: npt.NDArray[Any] = np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")
    return values.astype(np.float32)


FLOAT8 = "F8_E4M3"
SCALES = ("_scale", "_scale_inv")  # suffixes of the weight's name
_BLOCK = (128, 128)


def is_float8(quantization: Mapping[str, Any]) -> bool:
    """Whether config.json's quantization_config describes supported FP8 weights."""
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        return quantization.get("format") == "float-quantized"
    return method in ("fp8", "fbgemm_fp8") and quantization.get("fmt", "e4m3") == "e4m3"


def scale_block_size(quantization: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a block that shares a scale."""
    block = quantization.get("weight_block_size") or _BLOCK
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or any(size not in (16, 32, 64, 128, 256, 512) for size in block)
    ):
        raise ModelFileError(
            f"config.json: weight_block_size must be two powers of 2 from 16 to 512, got {block!r}"
        )
    return int(block[0]), int(block[1])


def scales_of_rows(
    name: str, shape: tuple[int, ...], scales: Floats, block: tuple[int, int]
) -> Floats:
    """Expand the scales of a tensor to [..., rows, blocks of a row]."""
    if len(shape) == 3:
        matrix_scales = [scales] * shape[0] if scales.size == 1 else list(scales)
        if len(matrix_scales) == shape[0]:
            return np.stack(
                [scales_of_rows(name, shape[1:], scale, block) for scale in matrix_scales]
            )
    rows, columns = shape[-2:]
    if scales.size == 1:
        return np.full((rows, 1), scales.reshape(()), np.float32)
    if scales.size == rows and scales.shape[0] == rows:
        return np.ascontiguousarray(scales.reshape(rows, 1))
    if scales.shape == (-(-rows // block[0]), -(-columns // block[1])):
        return np.repeat(scales, block[0], axis=0)[:rows]
    raise ModelFileError(
        f"tensor {name} has shape {shape} and scales of shape {scales.shape}, which fit neither "
        f"the tensor, its rows nor blocks of {block[0]} by {block[1]}; download it again"
    )


def float8_to_float32(data: npt.NDArray[np.uint8], scales: Floats) -> Floats:
    """Dequantize a tensor of two or more axes."""
    columns, blocks = data.shape[-1], scales.shape[-1]
    expanded = scales
    if blocks > 1:
        expanded = np.repeat(scales, block_width(columns, blocks), -1)[..., :columns]
    return np.asarray(_table()[data] * expanded, np.float32)


def block_width(columns: int, blocks: int) -> int:
    """Columns of a block: a power of two; the last block may be shorter."""
    return 1 << (-(-columns // blocks) - 1).bit_length()


@functools.cache
def _table() -> Floats:
    """Value of each byte: sign, 4 exponent bits, 3 fraction bits; 127 and 255 are NaN."""
    byte = np.arange(256)
    exponent, fraction = (byte >> 3) & 15, byte & 7
    least, normal = fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7)
    size = np.where(exponent == 0, least, normal)
    size[(byte & 127) == 127] = np.nan
    return np.where(byte < 128, size, -size).astype(np.float32)


FLOAT_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


def map_file(path: Path) -> mmap.mmap:
    """Memory-map a file for reading."""
    try:
        with path.open("rb") as handle:
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:  # an empty file cannot be mapped
        raise ModelFileError(f"{path}: the file is empty; download it again") from error
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror or error})") from error


@dataclass(frozen=True, slots=True, eq=False)
class FileTensor:
    """A tensor of a file; converted only on request, and copied only if necessary.

    Attributes:
        type: F32, F16, BF16 or a packed type (Q4_0, Q6_K, F8_E4M3, ...).
        data: float32, float16 or (BF16) uint16 in the tensor's shape; for a packed type uint8
            [..., bytes of a row]. A packed tensor has at least two axes.
        scales: Scales of an FP8 tensor, [..., blocks of a row].
        factor: Global scale of an NVFP4 matrix: one number, or one per matrix of a stack of three
            axes.
    """

    type: str
    data: npt.NDArray[Any]
    shape: tuple[int, ...]
    scales: npt.NDArray[np.float32] | None = None
    factor: npt.NDArray[np.float32] | None = None

    @classmethod
    def from_float32(cls, values: npt.NDArray[np.float32]) -> FileTensor:
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
        """The numbers as float32: a view if they are stored so, else dequantized."""
        if self.type == "F32":
            return self.data
        if self.type == "F16":
            return self.data.astype(np.float32)
        if self.type == "BF16":  # the upper half of a float32
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        if self.scales is not None:
            return float8_to_float32(self.data, self.scales)
        values = dequantize_blocks(self.type, self.data).reshape(self.shape)
        return values if self.factor is None else values * self.factor[..., None, None]

    def rows(self, start: int, stop: int) -> FileTensor:
        """A range of rows; a view."""
        data = self.data[start:stop]
        scales = None if self.scales is None else self.scales[start:stop]
        return FileTensor(self.type, data, (len(data), *self.shape[1:]), scales, self.factor)

    def inner_rows(self, start: int, stop: int) -> FileTensor:
        """A range of rows of every matrix of a tensor with three axes; a view."""
        data = self.data[:, start:stop]
        scales = None if self.scales is None else self.scales[:, start:stop]
        shape = (self.shape[0], data.shape[1], self.shape[2])
        return FileTensor(self.type, data, shape, scales, self.factor)

    def reordered(self, order: npt.NDArray[np.int64]) -> FileTensor:
        """All rows, permuted."""
        scales = None if self.scales is None else self.scales[order]
        return FileTensor(self.type, self.data[order], self.shape, scales, self.factor)

    def every_second(self, first: int) -> FileTensor:
        """Every second row of each matrix along the first axis, from `first` on; a view."""
        data = self.data[:, first::2]
        scales = None if self.scales is None else self.scales[:, first::2]
        shape = (data.shape[0], data.shape[1], *self.shape[2:])
        return FileTensor(self.type, data, shape, scales, self.factor)

    def part(self, axis: int, index: npt.NDArray[np.int64]) -> FileTensor:
        """Select indices along one axis. Along the last axis a packed tensor is dequantized, one
        matrix at a time."""
        if axis == len(self.shape) - 1 and self.packed:
            if axis == 2:
                return FileTensor.from_float32(
                    np.stack([matrix.part(1, index).data for matrix in self.slices()])
                )
            return FileTensor.from_float32(np.ascontiguousarray(self.float32()[..., index]))
        is_contiguous = bool(len(index)) and int(index[-1] - index[0]) == len(index) - 1
        selection = (
            slice(int(index[0]), int(index[-1]) + 1) if is_contiguous else index
        )  # a view if it may
        position = (slice(None),) * axis + (selection,)
        shape = (*self.shape[:axis], len(index), *self.shape[axis + 1 :])
        scales = None if self.scales is None else self.scales[position]
        return FileTensor(self.type, self.data[position], shape, scales, self.factor)

    def slices(self) -> list[FileTensor]:
        """The tensors along the first axis; views."""
        count = len(self.data)
        scales = [None] * count if self.scales is None else list(self.scales)
        factors = [None] * count if self.factor is None else list(self.factor)
        return [
            FileTensor(self.type, data, self.shape[1:], scale, factor)
            for data, scale, factor in zip(self.data, scales, factors, strict=True)
        ]

    @staticmethod
    def stacked(parts: Sequence[FileTensor]) -> FileTensor:
        """Stack tensors of one shape along a new first axis."""
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
            return FileTensor(
                parts[0].type,
                data,
                (len(parts), *shape),
                np.stack(scales) if scales else None,
                np.stack(factors) if factors else None,
            )
        return FileTensor.from_float32(np.stack([part.float32() for part in parts]))

    def transposed(self) -> FileTensor:
        """Transpose the last two axes."""
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        if self.packed:
            return FileTensor.from_float32(self.float32().swapaxes(-1, -2))
        return FileTensor(self.type, self.data.swapaxes(-1, -2), shape)

    def minus_one(self) -> FileTensor:
        return FileTensor.from_float32(self.float32() - np.float32(1))
