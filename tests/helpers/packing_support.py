"""Helpers of the packing tests: float tensors and quantized blocks as in files."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

from unspool.model.files.gguf import BLOCK_TYPES
from unspool.model.files.stored import UNSPOOL_BLOCK_BYTES, FileTensor

FLOATS = ("F32", "F16", "BF16")

# Values and bytes of a block, and offsets of its halves (scale, minimum or factors).
SIZES = {kind.name: (kind.elements, kind.size) for kind in BLOCK_TYPES.values()}
SIZES |= {name: (32, size) for name, size in UNSPOOL_BLOCK_BYTES.items()}
HALVES: dict[str, tuple[int, ...]] = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "Q4_1": (0, 2), "Q5_1": (0, 2), "AFFINE8": (0, 2), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
QUANTIZED = [kind for kind in SIZES if kind not in FLOATS]


def halves_of(kind: str) -> int:
    """Number of scales and minima of a block."""
    return len(HALVES.get(kind, (0,)))


def set_halves(kind: str, data: Any, halves: Any) -> None:
    """Set the scales (and minima) [halves, ...] of blocks [..., bytes], rounded to the type."""
    if kind == "MXFP4":  # a power of two
        with np.errstate(divide="ignore"):
            data[..., 0] = np.clip(np.rint(np.log2(np.abs(halves[0]))) + 128, 2, 250)
    elif kind == "NVFP4":  # one per sixteen columns
        data[..., :4] = gguf.quants.NVFP4.fp32_to_ue4m3(np.abs(halves[0]))[..., None]
        data[..., 3] ^= 1
    elif kind == "IQ1_M":  # four bits in each of four bytes
        bits = halves[0].astype("<f2").view("<u2")
        for place in range(4):
            top = ((bits >> (4 * place)) & 15).astype(np.uint8)
            at = 49 + 2 * place
            data[..., at] = (data[..., at] & 15) | top << 4
    else:
        for at, values in zip(HALVES.get(kind, (0,)), halves, strict=True):
            data[..., at : at + 2] = values.astype("<f2")[..., None].view(np.uint8)


def floats(kind: str, values: Any) -> FileTensor:
    """A float tensor of a type that represents the values exactly."""
    values = np.asarray(values, np.float32)
    if kind == "BF16":
        raw = quantize(values, gguf.GGMLQuantizationType.BF16).view("<u2").reshape(values.shape)
        return FileTensor(kind, raw, values.shape)
    return FileTensor(kind, values.astype({"F32": "<f4", "F16": "<f2"}[kind]), values.shape)
