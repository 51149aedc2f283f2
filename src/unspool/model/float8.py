"""FP8 weights (e4m3) of published checkpoints, with their scales.

A tensor `x.weight` has its scales in `x.weight_scale` (one for the tensor, or one per row) or in
`x.weight_scale_inv` (one per block, usually 128 by 128). Both multiply the weights. Stacked experts
have scales per matrix or for all of them. Settings for activations are ignored: activations are
never quantized here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.errors import ModelFileError
from unspool.model.block_types import Floats

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
