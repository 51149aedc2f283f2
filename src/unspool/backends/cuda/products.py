"""Products with a plain matrix: for one vector by our own kernel, for many by the vendor's."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unspool.backends.cuda.kernels.common import ACTIVATIONS, LAYER, NO_NORM, RMS
from unspool.backends.cuda.kernels.gemv import gemv

_NUMBERS_A_THREAD = 64  # of a matrix, held in registers at a time: enough loads in flight
_WARPS_AN_SM = 16


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    """An RMSNorm, or, with a bias, a LayerNorm."""

    gain: Tensor  # [width], float32
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Around:
    """What is folded into a product with one vector, or with each of a few."""

    eps: float
    norm: NormWeights | None = None  # of the vector
    activation: str = "none"
    gated: bool = False  # the lower half of the rows is multiplied with the activated upper one
    residual: Tensor | None = None  # added in the end
    early: bool = True  # whether the kernel behind may come up before the one ahead is done
    pdl: bool = False  # programmatic dependent launch


def norm_kind(norm: NormWeights | None) -> int:
    if norm is None:
        return NO_NORM
    return RMS if norm.bias is None else LAYER


def power_of_two(number: int) -> int:
    """The smallest one that holds so many."""
    return 1 << (number - 1).bit_length()


@functools.cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # of the interpreter, one after the other
    return torch.cuda.get_device_properties(device).multi_processor_count


def lines_of(x: Tensor) -> int:
    """How many vectors there are: one [columns], or several [n, columns]."""
    return 1 if x.dim() == 1 else len(x)


def steps(*vectors: Tensor | None) -> list[int]:
    """How far apart the lines of each of them are."""
    return [0 if x is None or x.dim() == 1 else x.stride(0) for x in vectors]


def tiling(
    rows: int, columns: int, tiles: int, size: int, lines: int, device: torch.device
) -> list[int]:
    """Rows a program takes at once, its warps, and how many programs each line has."""
    if device.type != "cuda":
        return [32, 1, min(-(-rows // 32), 2)]  # the interpreter's time goes by launches and loops
    wide = columns * tiles * size // 2
    at_once = 1 if wide >= 32_768 else 4 if wide <= 1024 and rows >= 16_384 else 2
    share = at_once * wide / (32 * _NUMBERS_A_THREAD)
    warps = max(1, min(16, 1 << round(math.log2(max(1, share)))))
    programs = processors(device) * min(8, max(1, _WARPS_AN_SM // warps))
    return [at_once, warps, min(-(-rows // at_once), -(-programs // lines))]


def times_each(weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor, by: Around) -> None:
    """out = W · x for one vector, or for each of a few, with all that `by` says."""
    rows, columns = weight.shape[0] // (1 + by.gated), weight.shape[1]
    tiles, lines = 1 + by.gated, lines_of(x)
    at_once, warps, programs = tiling(
        rows, columns, tiles, weight.element_size(), lines, weight.device
    )
    norm = by.norm
    gemv[(programs, lines)](
        x,
        x if norm is None else norm.gain,
        x if norm is None or norm.bias is None else norm.bias,
        weight,
        x if bias is None else bias,
        x if by.residual is None else by.residual,
        out,
        rows,
        by.eps,
        *steps(x, by.residual, out),
        K=columns,
        KP=power_of_two(columns),
        BN=at_once,
        NORM=norm_kind(norm),
        GLU=by.gated,
        ACTIVATION=ACTIVATIONS[by.activation],
        BIAS=bias is not None,
        RES=by.residual is not None,
        EARLY=by.early,
        PDL=by.pdl,
        num_warps=warps,
        launch_pdl=by.pdl,
    )


def times_many(weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor) -> None:
    """out [M, rows] = x [M, columns] · Wᵀ + bias."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
