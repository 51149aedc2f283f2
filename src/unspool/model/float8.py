"""FP8 weights (e4m3) as published checkpoints have them: bytes, and scales beside them.

A tensor `x.weight` of such numbers has its scales in `x.weight_scale` (one for the tensor, or one a
row) or in `x.weight_scale_inv` (one for each block, mostly 128 by 128). Both are multiplied with.
The matrices of all experts in one tensor have the same, for each matrix or for all of them.
What is said about activations is left aside: they are never rounded to 8 bits here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.errors import ModelFileError

FLOAT8 = "F8_E4M3"
SCALES = ("_scale", "_scale_inv")  # what stands behind the weight's name
_BLOCK = (128, 128)

Floats = npt.NDArray[np.float32]


def is_float8(quantization: Mapping[str, Any]) -> bool:
    """Whether config.json's quantization_config means weights that can be read."""
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        return quantization.get("format") == "float-quantized"
    return method in ("fp8", "fbgemm_fp8") and quantization.get("fmt", "e4m3") == "e4m3"


def block_of(quantization: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale, where scales are for blocks."""
    given = quantization.get("weight_block_size") or _BLOCK
    if (
        not isinstance(given, list | tuple)
        or len(given) != 2
        or any(size not in (16, 32, 64, 128, 256, 512) for size in given)
    ):
        raise ModelFileError(
            f"config.json says that blocks of weights are {given!r}, which is not supported; "
            "128 by 128 are usual"
        )
    return int(given[0]), int(given[1])


def scales_of_rows(
    name: str, shape: tuple[int, ...], scales: Floats, block: tuple[int, int]
) -> Floats:
    """[..., rows, blocks]: the scales of a tensor of this shape, each row with its own."""
    if len(shape) == 3:
        each = [scales] * shape[0] if scales.size == 1 else list(scales)
        if len(each) == shape[0]:
            return np.stack([scales_of_rows(name, shape[1:], one, block) for one in each])
    rows, columns = shape[-2:]
    if scales.size == 1:
        return np.full((rows, 1), scales.reshape(()), np.float32)
    if scales.size == rows and scales.shape[0] == rows:
        return np.ascontiguousarray(scales.reshape(rows, 1))
    if scales.shape == (-(-rows // block[0]), -(-columns // block[1])):
        return np.repeat(scales, block[0], axis=0)[:rows]
    raise ModelFileError(
        f"tensor {name} has the shape {shape}, and its scales {scales.shape}, which fits neither "
        f"the tensor, its rows nor blocks of {block[0]} by {block[1]}; download it again"
    )


def float8_to_float32(data: npt.NDArray[np.uint8], scales: Floats) -> Floats:
    """The numbers themselves, of a tensor of two or more axes."""
    columns, blocks = data.shape[-1], scales.shape[-1]
    wide = scales
    if blocks > 1:
        wide = np.repeat(scales, block_width(columns, blocks), -1)[..., :columns]
    return np.asarray(_table()[data] * wide, np.float32)


def block_width(columns: int, blocks: int) -> int:
    """Columns of a block; all but the last are full, and a power of two wide."""
    return 1 << (-(-columns // blocks) - 1).bit_length()


@functools.cache
def _table() -> Floats:
    """What each byte means: sign, 4 bits of the exponent, 3 behind the point; 127 is no number."""
    byte = np.arange(256)
    exponent, fraction = (byte >> 3) & 15, byte & 7
    least, normal = fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7)
    size = np.where(exponent == 0, least, normal)
    size[(byte & 127) == 127] = np.nan
    return np.where(byte < 128, size, -size).astype(np.float32)
