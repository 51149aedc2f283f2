"""What adapters add to a product, each line by its own: out += up · (down · x), in two launches.

A line's sums do not depend on the lines beside it. Line 0 of the adapters is nobody's: what has no
adapter is left as it is.
"""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import wait


@triton.jit
def shrink(
    x, down, adapters, low, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """low [lines, N] = down [adapter, N, K] · x [lines, K]."""
    wait(PDL)
    line = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    adapter = tl.load(adapters + line).to(tl.int64)
    if adapter > 0:
        total = tl.zeros([BN], tl.float32)
        weights = down + (adapter * N + rows[:, None]) * K
        for first in range(0, K, BK):
            cols = first + tl.arange(0, BK)
            inside = cols < K
            vector = tl.load(x + line * K + cols, mask=inside, other=0.0).to(tl.float32)
            mask = inside[None, :] & (rows[:, None] < N)
            part = tl.load(weights + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(part * vector[None, :], 1)
        tl.store(low + line * N + rows, total, mask=rows < N)


@triton.jit
def expand(
    low, up, adapters, out, SECOND, THIRD, N: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
    BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [lines, N] += up [adapter, N, R] · low [lines, PARTS * R]: rows from SECOND on read the
    second R numbers of `low`, those from THIRD on the third."""
    wait(PDL)
    line = tl.program_id(0).to(tl.int64)
    rows, ranks = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, R)
    adapter = tl.load(adapters + line).to(tl.int64)
    if adapter > 0:
        inside = rows < N
        part = (rows >= SECOND).to(tl.int32) + (rows >= THIRD).to(tl.int32)
        places = part[:, None] * R + ranks[None, :]
        narrow = tl.load(low + line * (PARTS * R) + places, mask=inside[:, None], other=0.0)
        weights = up + (adapter * N + rows[:, None]) * R + ranks[None, :]
        wide = tl.load(weights, mask=inside[:, None], other=0.0).to(tl.float32)
        at = out + line * N + rows
        sums = tl.load(at, mask=inside, other=0.0).to(tl.float32) + tl.sum(wide * narrow, 1)
        tl.store(at, sums.to(out.dtype.element_ty), mask=inside)
