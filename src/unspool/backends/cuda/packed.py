"""Quantized matrices that stay packed on the device: GGUF types in 4 and 8 bits, and FP8."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unspool.backends.cuda.kernels.common import ACTIVATIONS
from unspool.backends.cuda.kernels.packed import dequantize_rows_kernel, packed_gemm
from unspool.backends.cuda.kernels.packed_gemv import packed_gemv
from unspool.backends.cuda.packing import PackedLayout, PackedTensors
from unspool.backends.cuda.products import (
    Epilogue,
    gemm,
    next_power_of_two,
    norm_kind,
    num_multiprocessors,
    num_vectors,
    row_strides,
)

_MAX_REGISTER_ROWS = 64  # up to this many rows of x, weights are dequantized in registers
_UNITS_PER_THREAD = 4  # loads in flight
_MAX_WARPS, _PACKED_WARPS_PER_SM = 16, 16
_MAX_REGISTERS = 128  # per thread, so that all these warps fit
_DEQUANT_SIZE = 1 << 25  # weights that are dequantized at a time for larger batches


@functools.cache
def _dequant_buffer(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Buffer for dequantized rows, shared by all matrices of a device."""
    return torch.empty(size, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A quantized matrix. Vectors are in `dtype`."""

    packing: PackedLayout
    parts: PackedTensors
    rows: int
    columns: int
    dtype: torch.dtype
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.parts.nbytes

    @property
    def device(self) -> torch.device:
        return self.parts.quants.device

    @property
    def _units(self) -> int:
        return self.columns // self.packing.unit

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.parts
        placeholder = parts.quants
        return (
            parts.quants,
            placeholder if parts.records is None else parts.records,
            placeholder if parts.factors is None else parts.factors,
        )

    def _constants(self) -> dict[str, Any]:
        packing = self.packing
        return {
            "U": self._units, "BITS": packing.bits, "KIND": packing.kind, "OFFSET": packing.offset,
            "SHARE": packing.share,
        }  # fmt: skip

    def gemv(self, x: Tensor, out: Tensor, epilogue: Epilogue) -> None:
        """out = W · x for one vector or each of a few, with fused operations."""
        rows, norm, vectors = self.rows // (1 + epilogue.gated), epilogue.norm, num_vectors(x)
        block_rows, warps, programs = packed_gemv_tiling(
            rows, self._units, 1 + epilogue.gated, vectors, x.device
        )
        packed_gemv[(programs, vectors)](
            x,
            x if norm is None else norm.gain,
            x if norm is None or norm.bias is None else norm.bias,
            *self._tensors(),
            x if self.bias is None else self.bias,
            x if epilogue.residual is None else epilogue.residual,
            out,
            rows,
            epilogue.eps,
            *row_strides(x, epilogue.residual, out),
            K=self.columns,
            UP=next_power_of_two(self._units),
            **self._constants(),
            BN=block_rows,
            NORM=norm_kind(norm),
            GLU=epilogue.gated,
            ACTIVATION=ACTIVATIONS[epilogue.activation],
            BIAS=self.bias is not None,
            RES=epilogue.residual is not None,
            EARLY=epilogue.early,
            PDL=epilogue.pdl,
            NATIVE=x.is_cuda,
            maxnreg=_MAX_REGISTERS,
            num_warps=warps,
            launch_pdl=epilogue.pdl,
        )

    def gemm(self, x: Tensor, out: Tensor, exact: bool = False, pdl: bool = False) -> None:
        """out [M, rows] = x [M, columns] · Wᵀ + bias."""
        if exact or len(x) <= _MAX_REGISTER_ROWS:
            self._small_gemm(x, out)
            return
        step = _DEQUANT_SIZE // self.columns
        buffer = _dequant_buffer(_DEQUANT_SIZE, x.dtype, x.device)
        for first in range(0, self.rows, step):
            last = min(first + step, self.rows)
            block = buffer[: (last - first) * self.columns].view(-1, self.columns)
            self.dequantize(first, block)
            bias = None if self.bias is None else self.bias[first:last]
            gemm(block, bias, x, out[:, first:last])

    def _small_gemm(self, x: Tensor, out: Tensor) -> None:
        vectors = len(x)
        block_rows = min(64, max(16, next_power_of_two(vectors)))
        grid = (-(-self.rows // 64), -(-vectors // block_rows))
        packed_gemm[grid](
            x,
            *self._tensors(),
            x if self.bias is None else self.bias,
            out,
            vectors,
            self.rows,
            out.stride(0),
            K=self.columns,
            **self._constants(),
            BN=64,
            BM=block_rows,
            BU=128 // self.packing.unit,
            BIAS=self.bias is not None,
            num_warps=4,
        )

    def dequantize(self, first: int, out: Tensor) -> None:
        """Dequantize rows from `first` on, as many as `out` has."""
        units = min(64, next_power_of_two(self._units))
        grid = (-(-len(out) // 4), -(-self._units // units))
        dequantize_rows_kernel[grid](
            *self._tensors(), out, out, out, first, first + len(out),
            **self._constants(), BU=units, BN=4, CHOSEN=False,
        )  # fmt: skip

    def embed_tokens(self, tokens: Tensor, previous: Tensor, out: Tensor) -> None:
        """Embed tokens; a token -1 - n stands for `previous[n]`."""
        units = min(128, next_power_of_two(self._units))
        grid = (len(tokens), -(-self._units // units))
        dequantize_rows_kernel[grid](
            *self._tensors(), tokens, previous, out, 0, self.rows,
            **self._constants(), BU=units, BN=1, CHOSEN=True,
        )  # fmt: skip

    def float_rows(self, first: int, last: int) -> Tensor:
        """Rows `first` to `last` in float32."""
        out = torch.empty(last - first, self.columns, device=self.device)
        self.dequantize(first, out)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class StackedMatrix:
    """Matrices of different quantization types, stacked by rows and multiplied one by one."""

    parts: tuple[PackedMatrix, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:
        return self.parts[0].columns

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def bias(self) -> Tensor | None:
        biases = [part.bias for part in self.parts if part.bias is not None]
        return torch.cat(biases) if biases else None

    def _row_slices(self) -> Iterator[tuple[PackedMatrix, slice]]:
        first = 0
        for part in self.parts:
            yield part, slice(first, first + part.rows)
            first += part.rows

    def gemv(self, x: Tensor, out: Tensor, epilogue: Epilogue) -> None:
        """out = W · x for one vector or each of a few; never gated (see `WeightLoader`)."""
        for part, rows in self._row_slices():
            residual = None if epilogue.residual is None else epilogue.residual[..., rows]
            part.gemv(x, out[..., rows], replace(epilogue, residual=residual))

    def gemm(self, x: Tensor, out: Tensor, exact: bool = False, pdl: bool = False) -> None:
        for part, rows in self._row_slices():
            part.gemm(x, out[:, rows], exact=exact)

    def float_rows(self, first: int, last: int) -> Tensor:
        """Rows `first` to `last` in float32."""
        blocks = [
            part.float_rows(max(first, rows.start) - rows.start, min(last, rows.stop) - rows.start)
            for part, rows in self._row_slices()
            if first < rows.stop and last > rows.start
        ]
        return torch.cat(blocks)


@functools.cache
def packed_gemv_tiling(
    rows: int, units: int, tiles: int, vectors: int, device: torch.device
) -> tuple[int, int, int]:
    """Rows per iteration and warps of a program, and programs per vector.

    All programs run at the same time: each iterates over its share of the rows.
    """
    padded_units = next_power_of_two(units)
    warps = max(1, min(_MAX_WARPS, padded_units // 32))
    block_rows = max(1, _UNITS_PER_THREAD * 32 * warps // padded_units // tiles)
    programs = num_multiprocessors(device) * min(16, _PACKED_WARPS_PER_SM // warps)
    return block_rows, warps, min(-(-rows // block_rows), -(-programs // vectors))
