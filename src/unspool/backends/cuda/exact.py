"""Products with sums in one order: which tiles for how many lines, and the launch.

What decides a number's sum (how many columns at a time, how many parts) depends on the matrix
alone; what depends on the lines only says who computes it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from unspool.backends.cuda.kernels.exact import exact_product

_COLUMNS = 64  # that are summed at a time
_FEW = 64  # up to so many lines several programs share a tile's columns
_MOST_SPLITS = 8


@dataclass(frozen=True, slots=True, eq=False)
class ExactScratch:
    """Where programs leave the sums of their parts."""

    parts: Tensor
    arrived: Tensor  # all zero between launches

    @classmethod
    @functools.cache
    def of(cls, device: torch.device) -> ExactScratch:
        size = _FEW * 16_384 * _MOST_SPLITS
        return cls(
            torch.empty(size, dtype=torch.float32, device=device),
            torch.zeros(16_384, dtype=torch.int32, device=device),
        )


@functools.cache
def splits(rows: int, columns: int) -> int:
    """Into how many parts the columns are cut: so that even one line keeps a large GPU busy. The
    number is the same on every GPU, as the text would differ otherwise."""
    tiles, most = -(-rows // 64), max(1, columns // (4 * _COLUMNS))
    found = 1
    while found < min(_MOST_SPLITS, most) and tiles * found < 264:
        found *= 2
    return found


def exact_many(
    weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor, *, pdl: bool = False
) -> None:
    """out [M, rows] = x [M, columns] · Wᵀ + bias."""
    count, (rows, columns) = len(x), weight.shape
    parts = splits(rows, columns)
    together = parts == 1 or count > _FEW or rows > 16_384
    high, wide, stages, warps = _tile(count, parts)
    grid = (-(-rows // high), -(-count // wide), 1 if together else parts)
    scratch = ExactScratch.of(weight.device)
    exact_product[grid](
        x, weight, x if bias is None else bias, out, scratch.parts, scratch.arrived, count, rows,
        K=columns, SPLITS=parts, TOGETHER=together, BM=wide, BN=high, BK=_COLUMNS, STAGES=stages,
        BIAS=bias is not None, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip


def _tile(count: int, parts: int) -> tuple[int, int, int, int]:
    """Rows of the matrix, lines, stages and warps of a program; the best of those measured."""
    if count <= 64:
        return 64, 16 if count <= 16 else 32 if count <= 32 else 64, 6, 4
    if parts > 1:
        return (64, 64, 6, 4) if count <= 256 else (64, 128, 4, 4)
    return (128, 128, 3, 4) if count <= 128 else (128, 256, 3, 8)
