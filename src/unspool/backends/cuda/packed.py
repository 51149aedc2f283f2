"""A matrix whose weights stay packed on the device: 4 and 8 bits as GGUF has them, and FP8."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unspool.backends.cuda.kernels.common import ACTIVATIONS
from unspool.backends.cuda.kernels.packed import packed_gemv, packed_rows, unpack
from unspool.backends.cuda.packing import Packing, Parts
from unspool.backends.cuda.products import (
    Around,
    norm_kind,
    power_of_two,
    processors,
    times_many,
)

_FEW = 64  # rows up to which weights are unpacked in registers
_SCRATCH = 1 << 25  # numbers that are unpacked at a time for more


@functools.cache
def _scratch(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Room for unpacked rows, shared by all matrices of a device: one is multiplied at a time."""
    return torch.empty(_SCRATCH, dtype=dtype, device=device)


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
            "SHARE": how.share, "TALL": how.tall,
        }  # fmt: skip

    def times_one(self, x: Tensor, out: Tensor, by: Around) -> None:
        """For one vector, with what is folded into the product."""
        rows, norm = self.rows // (1 + by.gated), by.norm
        at_once, warps, programs = tiling(rows, self._units, 1 + by.gated, x.device)
        packed_gemv[(programs,)](
            x,
            x if norm is None else norm.gain,
            x if norm is None or norm.bias is None else norm.bias,
            *self._tensors(),
            x if self.bias is None else self.bias,
            x if by.residual is None else by.residual,
            out,
            rows,
            by.eps,
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
            num_warps=warps,
            launch_pdl=by.pdl,
        )

    def times_many(self, x: Tensor, out: Tensor, exact: bool = False, pdl: bool = False) -> None:
        """out [M, rows] = x [M, columns] · Wᵀ + bias."""
        if exact or len(x) <= _FEW:
            return self._times_few(x, out)
        step = _SCRATCH // self.columns
        room = _scratch(x.device, x.dtype)
        for first in range(0, self.rows, step):
            last = min(first + step, self.rows)
            part = room[: (last - first) * self.columns].view(-1, self.columns)
            self._unpack(first, part)
            bias = None if self.bias is None else self.bias[first:last]
            times_many(part, bias, x, out[:, first:last])
        return None

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
            BU=16,
            BIAS=self.bias is not None,
            num_warps=4,
        )

    def _unpack(self, first: int, out: Tensor) -> None:
        """Rows from `first` on as plain numbers, as many as `out` has."""
        units = min(64, power_of_two(self._units))
        grid = (-(-len(out) // 4), -(-self._units // units))
        unpack[grid](
            *self._tensors(), out, out, out, first, first + len(out),
            **self._constants(), BU=units, BN=4, CHOSEN=False,
        )  # fmt: skip

    def gather(self, tokens: Tensor, previous: Tensor, out: Tensor) -> None:
        """The rows of tokens; a token -1 - n is the n-th of the `previous` ones."""
        units = min(128, power_of_two(self._units))
        grid = (len(tokens), -(-self._units // units))
        unpack[grid](
            *self._tensors(), tokens, previous, out, 0, self.rows,
            **self._constants(), BU=units, BN=1, CHOSEN=True,
        )  # fmt: skip

    def part(self, first: int, last: int) -> Tensor:
        """Some rows in 32 bits."""
        out = torch.empty(last - first, self.columns, device=self.device)
        self._unpack(first, out)
        return out


def tiling(rows: int, units: int, tiles: int, device: torch.device) -> list[int]:
    """Rows a program takes at once, its warps, and how many programs there are."""
    warps = max(1, min(16, power_of_two(units) // 32))
    at_once = 4 // tiles
    programs = processors(device) * max(1, min(8, 16 // warps))
    return [at_once, warps, min(-(-rows // at_once), programs)]
