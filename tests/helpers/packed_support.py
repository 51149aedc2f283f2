"""Shared by the tests of packed matrices: random blocks of every type that GGUF files have."""

from __future__ import annotations

import gguf
import numpy as np
from gguf.quants import dequantize

from unspool.backends.cuda.matmul import BLOCKS

# Where a block's 16-bit floats stand, whose bits must not be drawn at random.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def random_blocks(type: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Rows of a GGUF type, [rows, bytes], with every pattern of bits in the packed numbers."""
    rng = np.random.default_rng(seed)
    elements, size = BLOCKS[type]
    blocks = rng.integers(0, 256, (rows, columns // elements, size), dtype=np.uint8)
    if type == "MXFP4":  # powers of two
        blocks[..., 0] = rng.integers(110, 130, blocks.shape[:2])
    for at in _HALVES.get(type, ()):
        halves = rng.normal(0, 0.01, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


def numbers(type: str, blocks: np.ndarray) -> np.ndarray:
    """What gguf's own reader makes of them."""
    return dequantize(blocks, gguf.GGMLQuantizationType[type])
