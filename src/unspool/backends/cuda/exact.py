"""GEMM with a fixed order of summation: choice of tiles, and the launch.

The order of summation (columns per tile, number of splits) depends on the matrix only; the batch
size only decides which program computes what.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from unspool.backends.cuda.kernels.exact import exact_gemm_kernel

_EXACT_COLUMNS = 64  # per tl.dot
_MAX_SPLIT_ROWS = (
    64  # up to this many rows of x, several programs share the columns of a tile (split-K)
)
_MAX_SPLITS = 8


@dataclass(frozen=True, slots=True, eq=False)
class ExactScratch:
    """Partial sums of split-K."""

    parts: Tensor
    arrived: Tensor  # all zero between launches

    @classmethod
    @functools.cache
    def for_device(cls, device: torch.device) -> ExactScratch:
        size = _MAX_SPLIT_ROWS * 16_384 * _MAX_SPLITS
        return cls(
            torch.empty(size, dtype=torch.float32, device=device),
            torch.zeros(16_384, dtype=torch.int32, device=device),
        )


@functools.cache
def num_splits(rows: int, columns: int) -> int:
    """Number of splits of the columns: even a single row keeps a large GPU busy.

    The same on every GPU, otherwise the generated text would differ.
    """
    tiles, max_splits = -(-rows // 64), max(1, columns // (4 * _EXACT_COLUMNS))
    count = 1
    while count < min(_MAX_SPLITS, max_splits) and tiles * count < 264:
        count *= 2
    return count


def exact_gemm(
    weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor, *, pdl: bool = False
) -> None:
    """out [M, rows] = x [M, columns] · Wᵀ + bias."""
    count, (rows, columns) = len(x), weight.shape
    parts = num_splits(rows, columns)
    one_program = parts == 1 or count > _MAX_SPLIT_ROWS or rows > 16_384
    tile_rows, tile_batch, stages, warps = _exact_tile(count, parts)
    grid = (-(-rows // tile_rows), -(-count // tile_batch), 1 if one_program else parts)
    scratch = ExactScratch.for_device(weight.device)
    exact_gemm_kernel[grid](
        x, weight, x if bias is None else bias, out, scratch.parts, scratch.arrived, count, rows,
        K=columns, SPLITS=parts, ONE_PROGRAM=one_program, BM=tile_batch, BN=tile_rows,
        BK=_EXACT_COLUMNS, STAGES=stages, BIAS=bias is not None, PDL=pdl, num_warps=warps,
        launch_pdl=pdl,
    )  # fmt: skip


def _exact_tile(count: int, parts: int) -> tuple[int, int, int, int]:
    """Rows of the matrix, rows of x, stages and warps of a program; the fastest measured."""
    if count <= 64:
        return 64, 16 if count <= 16 else 32 if count <= 32 else 64, 6, 4
    if parts > 1:
        return (64, 64, 6, 4) if count <= 256 else (64, 128, 4, 4)
    return (128, 128, 3, 4) if count <= 128 else (128, 256, 3, 8)
