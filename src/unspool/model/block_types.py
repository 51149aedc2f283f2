"""Blocks of packed numbers, unpacked: GGUF's types, and three of our own.

Ours are what other files' groups of 4 or 8 bits become, so that they move through loading like
GGUF's. All have 32 numbers, a scale in 16 bits, and

    ZERO4     the zero point in a byte, 4 bits a number as in Q4_0:  scale * (number - zero)
    ZERO8     the same with 8 bits a number
    AFFINE8   a minimum in 16 bits, 8 bits a number:                 scale * number + minimum
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

GROUP = 32
OWN_TYPES = {"ZERO4": 19, "ZERO8": 35, "AFFINE8": 36}  # bytes of a block


def unpacked(type: str, data: Bytes) -> Floats:
    """The numbers of rows of blocks, [..., columns]."""
    if type in OWN_TYPES:
        return _own(type, data)
    if type == "Q1_0":
        return _one_bit(data)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values: Floats = dequantize(data, GGMLQuantizationType[type])
    return values


def _own(type: str, data: Bytes) -> Floats:
    blocks = data.reshape(-1, OWN_TYPES[type])
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


def _one_bit(data: Bytes) -> Floats:
    """128 numbers in 18 bytes: a scale, and the sign of each (1: plus)."""
    blocks = data.reshape(-1, 18)
    plus = np.unpackbits(np.ascontiguousarray(blocks[:, 2:]), axis=-1, bitorder="little")
    values = _halves(blocks, 0) * np.where(plus, np.float32(1), np.float32(-1))
    return values.reshape(*data.shape[:-1], -1)


def _halves(blocks: Bytes, start: int) -> Floats:
    found: npt.NDArray[Any] = np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")
    return found.astype(np.float32)
