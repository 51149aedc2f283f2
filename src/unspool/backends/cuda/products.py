"""Matrix products with unquantized weights: GEMV by our kernel, GEMM by cuBLAS."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unspool.backends.cuda.kernels.common import ACTIVATIONS, LAYER, NO_NORM, RMS
from unspool.backends.cuda.kernels.gemv import gemv_kernel

_WEIGHTS_PER_THREAD = 64  # held in registers: enough loads in flight
_WARPS_PER_SM = 16


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    """An RMSNorm, or, with a bias, a LayerNorm."""

    gain: Tensor  # [width], float32
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Epilogue:
    """Operations fused into a GEMV: norm before it; activation, gate and residual after it."""

    eps: float
    norm: NormWeights | None = None  # of the input vector
    activation: str = "none"
    gated: bool = False  # GLU: activation(upper half of the rows) * lower half
    residual: Tensor | None = None  # added at the end
    early: bool = True  # whether the next kernel may start before the previous one has ended
    pdl: bool = False  # programmatic dependent launch


def norm_kind(norm: NormWeights | None) -> int:
    if norm is None:
        return NO_NORM
    return RMS if norm.bias is None else LAYER


def next_power_of_two(number: int) -> int:
    """Smallest power of two >= number."""
    return 1 << (number - 1).bit_length()


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # Triton's interpreter runs programs one after the other
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_vectors(x: Tensor) -> int:
    """Number of vectors: x is [columns] or [n, columns]."""
    return 1 if x.dim() == 1 else len(x)


def row_strides(*vectors: Tensor | None) -> list[int]:
    """Row stride of each tensor; 0 for a single vector or None."""
    return [0 if x is None or x.dim() == 1 else x.stride(0) for x in vectors]


def gemv_tiling(
    rows: int, columns: int, tiles: int, size: int, vectors: int, device: torch.device
) -> list[int]:
    """Rows per iteration and warps of a program, and programs per vector."""
    if device.type != "cuda":
        return [32, 1, min(-(-rows // 32), 2)]  # few launches and loops: the interpreter is slow
    half_width = columns * tiles * size // 2
    block_rows = 1 if half_width >= 32_768 else 4 if half_width <= 1024 and rows >= 16_384 else 2
    threads = block_rows * half_width / (32 * _WEIGHTS_PER_THREAD)
    warps = max(1, min(16, 1 << round(math.log2(max(1, threads)))))
    programs = num_multiprocessors(device) * min(8, max(1, _WARPS_PER_SM // warps))
    return [block_rows, warps, min(-(-rows // block_rows), -(-programs // vectors))]


def gemv(weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """out = W · x for one vector or each of a few, with fused operations."""
    rows, columns = weight.shape[0] // (1 + epilogue.gated), weight.shape[1]
    tiles, vectors = 1 + epilogue.gated, num_vectors(x)
    block_rows, warps, programs = gemv_tiling(
        rows, columns, tiles, weight.element_size(), vectors, weight.device
    )
    norm = epilogue.norm
    gemv_kernel[(programs, vectors)](
        x,
        x if norm is None else norm.gain,
        x if norm is None or norm.bias is None else norm.bias,
        weight,
        x if bias is None else bias,
        x if epilogue.residual is None else epilogue.residual,
        out,
        rows,
        epilogue.eps,
        *row_strides(x, epilogue.residual, out),
        K=columns,
        KP=next_power_of_two(columns),
        BN=block_rows,
        NORM=norm_kind(norm),
        GLU=epilogue.gated,
        ACTIVATION=ACTIVATIONS[epilogue.activation],
        BIAS=bias is not None,
        RES=epilogue.residual is not None,
        EARLY=epilogue.early,
        PDL=epilogue.pdl,
        num_warps=warps,
        launch_pdl=epilogue.pdl,
    )


def gemm(weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor) -> None:
    """out [M, rows] = x [M, columns] · Wᵀ + bias."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
