"""A matrix whose weights stay packed on the device: 4 and 8 bits as GGUF has them, and FP8."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unspool.backends.cuda.kernels.common import ACTIVATIONS
from unspool.backends.cuda.kernels.packed import packed_rows, unpack_rows
from unspool.backends.cuda.kernels.packed_gemv import packed_gemv
from unspool.backends.cuda.packing import Packing, Parts
from unspool.backends.cuda.products import (
    Around,
    lines_of,
    norm_kind,
    power_of_two,
    processors,
    steps,
    times_many,
)

_FEW = 64  # rows up to which weights are unpacked in registers
_UNITS_A_THREAD = 4  # read at a time
_MOST_WARPS, _WARPS_AN_SM = 16, 16
_REGISTERS = 128  # of a thread: so many that all these warps have room
_SCRATCH = 1 << 25  # numbers that are unpacked at a time for more


@functools.cache
def _scratch(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for unpacked rows, shared by all matrices of a device: one is multiplied at a time."""
    return torch.empty(size, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """What vectors are multiplied with, as `PlainMatrix`; vectors are in `dtype`."""

    packing: Packing
    parts: Parts
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
        nothing = parts.quants
        return (
            parts.quants,
            nothing if parts.records is None else parts.records,
            nothing if parts.factors is None else parts.factors,
        )

    def _constants(self) -> dict[str, Any]:
        how = self.packing
        return {
            "U": self._units, "BITS": how.bits, "KIND": how.kind, "OFFSET": how.offset,
            "SHARE": how.share,
        }  # fmt: skip

    def times_each(self, x: Tensor, out: Tensor, by: Around) -> None:
        """For one vector or each of a few, with what is folded into the product."""
        rows, norm, lines = self.rows // (1 + by.gated), by.norm, lines_of(x)
        at_once, warps, programs = tiling(rows, self._units, 1 + by.gated, lines, x.device)
        packed_gemv[(programs, lines)](
            x,
            x if norm is None else norm.gain,
            x if norm is None or norm.bias is None else norm.bias,
            *self._tensors(),
            x if self.bias is None else self.bias,
            x if by.residual is None else by.residual,
            out,
            rows,
            by.eps,
            *steps(x, by.residual, out),
            K=self.columns,
            UP=power_of_two(self._units),
            **self._constants(),
            BN=at_once,
            NORM=norm_kind(norm),
            GLU=by.gated,
            ACTIVATION=ACTIVATIONS[by.activation],
            BIAS=self.bias is not None,
            RES=by.residual is not None,
            EARLY=by.early,
            PDL=by.pdl,
            NATIVE=x.is_cuda,
            maxnreg=_REGISTERS,
            num_warps=warps,
            launch_pdl=by.pdl,
        )

    def times_many(self, x: Tensor, out: Tensor, exact: bool = False, pdl: bool = False) -> None:
        """out [M, rows] = x [M, columns] · Wᵀ + bias."""
        if exact or len(x) <= _FEW:
            self._times_few(x, out)
            return
        step = _SCRATCH // self.columns
        room = _scratch(_SCRATCH, x.dtype, x.device)
        for first in range(0, self.rows, step):
            last = min(first + step, self.rows)
            part = room[: (last - first) * self.columns].view(-1, self.columns)
            self.unpack(first, part)
            bias = None if self.bias is None else self.bias[first:last]
            times_many(part, bias, x, out[:, first:last])

    def _times_few(self, x: Tensor, out: Tensor) -> None:
        lines = len(x)
        at_once = min(64, max(16, power_of_two(lines)))
        grid = (-(-self.rows // 64), -(-lines // at_once))
        packed_rows[grid](
            x,
            *self._tensors(),
            x if self.bias is None else self.bias,
            out,
            lines,
            self.rows,
            out.stride(0),
            K=self.columns,
            **self._constants(),
            BN=64,
            BM=at_once,
            BU=128 // self.packing.unit,
            BIAS=self.bias is not None,
            num_warps=4,
        )

    def unpack(self, first: int, out: Tensor) -> None:
        """Rows from `first` on as plain numbers, as many as `out` has."""
        units = min(64, power_of_two(self._units))
        grid = (-(-len(out) // 4), -(-self._units // units))
        unpack_rows[grid](
            *self._tensors(), out, out, out, first, first + len(out),
            **self._constants(), BU=units, BN=4, CHOSEN=False,
        )  # fmt: skip

    def gather(self, tokens: Tensor, previous: Tensor, out: Tensor) -> None:
        """The rows of tokens; a token -1 - n is the n-th of the `previous` ones."""
        units = min(128, power_of_two(self._units))
        grid = (len(tokens), -(-self._units // units))
        unpack_rows[grid](
            *self._tensors(), tokens, previous, out, 0, self.rows,
            **self._constants(), BU=units, BN=1, CHOSEN=True,
        )  # fmt: skip

    def part(self, first: int, last: int) -> Tensor:
        """Some rows in 32 bits."""
        out = torch.empty(last - first, self.columns, device=self.device)
        self.unpack(first, out)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class StackedMatrix:
    """Matrices that are packed differently, one above the other: each is multiplied by itself."""

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

    def _placed(self) -> Iterator[tuple[PackedMatrix, slice]]:
        first = 0
        for part in self.parts:
            yield part, slice(first, first + part.rows)
            first += part.rows

    def times_each(self, x: Tensor, out: Tensor, by: Around) -> None:
        """For one vector or each of a few; what is gated is never kept so (see `load.py`)."""
        for part, rows in self._placed():
            residual = None if by.residual is None else by.residual[..., rows]
            part.times_each(x, out[..., rows], replace(by, residual=residual))

    def times_many(self, x: Tensor, out: Tensor, exact: bool = False, pdl: bool = False) -> None:
        for part, rows in self._placed():
            part.times_many(x, out[:, rows], exact=exact)

    def part(self, first: int, last: int) -> Tensor:
        """Some rows in 32 bits."""
        found = [
            part.part(max(first, rows.start) - rows.start, min(last, rows.stop) - rows.start)
            for part, rows in self._placed()
            if first < rows.stop and last > rows.start
        ]
        return torch.cat(found)


@functools.cache
def tiling(
    rows: int, units: int, tiles: int, lines: int, device: torch.device
) -> tuple[int, int, int]:
    """Rows a program takes at once, its warps, and how many programs each line has: as many in all
    as find room at the same time, since each goes through its share of the rows."""
    wide = power_of_two(units)
    warps = max(1, min(_MOST_WARPS, wide // 32))
    at_once = max(1, _UNITS_A_THREAD * 32 * warps // wide // tiles)
    programs = processors(device) * min(16, _WARPS_AN_SM // warps)
    return at_once, warps, min(-(-rows // at_once), -(-programs // lines))
