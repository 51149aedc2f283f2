"""LoRA with one adapter per row: out += up · (down · x), in two launches.

A row's result does not depend on other rows. Slot 0 means no adapter: `out` is not changed.
"""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import wait


@triton.jit
def shrink(
    x, down, slots, low, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """low [batch, N] = down [slot, N, K] · x [batch, K]."""
    wait(PDL)
    batch_row = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    slot = tl.load(slots + batch_row).to(tl.int64)
    if slot > 0:
        total = tl.zeros([BN], tl.float32)
        weights = down + (slot * N + rows[:, None]) * K
        for first in range(0, K, BK):
            cols = first + tl.arange(0, BK)
            inside = cols < K
            vector = tl.load(x + batch_row * K + cols, mask=inside, other=0.0).to(tl.float32)
            mask = inside[None, :] & (rows[:, None] < N)
            part = tl.load(weights + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(part * vector[None, :], 1)
        tl.store(low + batch_row * N + rows, total, mask=rows < N)


@triton.jit
def expand(
    low, up, slots, out, SECOND, THIRD, N: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
    BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [batch, N] += up [slot, N, R] · low [batch, PARTS * R].

    For fused matrices: rows from SECOND on use the second R columns of `low`, those from THIRD on
    the third.
    """
    wait(PDL)
    batch_row = tl.program_id(0).to(tl.int64)
    rows, ranks = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, R)
    slot = tl.load(slots + batch_row).to(tl.int64)
    if slot > 0:
        inside = rows < N
        part = (rows >= SECOND).to(tl.int32) + (rows >= THIRD).to(tl.int32)
        columns = part[:, None] * R + ranks[None, :]
        low_part = tl.load(low + batch_row * (PARTS * R) + columns, mask=inside[:, None], other=0.0)
        weights = up + (slot * N + rows[:, None]) * R + ranks[None, :]
        up_part = tl.load(weights, mask=inside[:, None], other=0.0).to(tl.float32)
        out_ptr = out + batch_row * N + rows
        sums = tl.load(out_ptr, mask=inside, other=0.0).to(tl.float32) + tl.sum(
            up_part * low_part, 1
        )
        tl.store(out_ptr, sums.to(out.dtype.element_ty), mask=inside)
