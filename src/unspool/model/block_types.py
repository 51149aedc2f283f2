"""Dequantize packed blocks: GGUF's types, and three of Unspool's.

Unspool's types hold the 4- and 8-bit groups of other formats, so that these are loaded like GGUF
blocks. All have 32 numbers, a 16-bit scale, and

    ZERO4     a zero point of one byte, 4-bit numbers as in Q4_0:  scale * (number - zero)
    ZERO8     the same with 8-bit numbers
    AFFINE8   a 16-bit minimum, 8-bit numbers:                     scale * number + minimum
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

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
