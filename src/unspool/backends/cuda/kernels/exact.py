"""A product whose sums have one order, whatever the batch: a row alone and among others gives the
same bits.

The columns are cut into SPLITS parts of fixed length. Each part is summed on tensor cores, BK
columns at a time from left to right, and the sums of the parts are added in order: by one program
where there are many lines, and where there are few by the last of several that share the work.
"""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import wait


@triton.jit
def _part(
    x, w, rows, lines, first, last, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """W · xᵀ over the columns from `first` to `last`: [BN, BM]."""
    sums = tl.zeros((BN, BM), tl.float32)
    for at in tl.range(first, last, BK, num_stages=STAGES):
        cols = at + tl.arange(0, BK)
        inside = (rows < N)[:, None]
        known = (lines < M)[None, :]
        if K % BK != 0:
            inside = inside & (cols < K)[None, :]
            known = known & (cols < K)[:, None]
        tile = tl.load(w + rows.to(tl.int64)[:, None] * K + cols[None, :], mask=inside, other=0.0)
        part = tl.load(x + lines.to(tl.int64)[None, :] * K + cols[:, None], mask=known, other=0.0)
        sums = tl.dot(tile, part, sums, input_precision="ieee")
    return sums


@triton.jit
def exact_product(
    x, w, bias, out, parts, arrived, M, N,
    K: tl.constexpr, SPLITS: tl.constexpr, TOGETHER: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x [M, K] · Wᵀ + bias. TOGETHER: one program sums all parts of its tile."""
    LENGTH: tl.constexpr = ((K + BK - 1) // BK + SPLITS - 1) // SPLITS * BK  # columns of a part
    tile, column = tl.program_id(0), tl.program_id(1)
    rows, lines = tile * BN + tl.arange(0, BN), column * BM + tl.arange(0, BM)
    wait(PDL)
    total = tl.zeros((BN, BM), tl.float32)
    done = True
    if TOGETHER:
        for split in range(SPLITS):
            first = split * LENGTH
            last = tl.minimum(first + LENGTH, K)
            total += _part(x, w, rows, lines, first, last, M, N, K, BM, BN, BK, STAGES)
    else:
        split = tl.program_id(2)
        first = split * LENGTH
        last = tl.minimum(first + LENGTH, K)
        sums = _part(x, w, rows, lines, first, last, M, N, K, BM, BN, BK, STAGES)
        place = lines[None, :] * N + rows[:, None]
        inside = (lines < M)[None, :] & (rows < N)[:, None]
        tl.store(parts + split * M * N + place, sums, mask=inside)
        tl.debug_barrier()
        counter = arrived + column * tl.num_programs(0) + tile
        done = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
        if done:
            tl.store(counter, 0)
            for number in range(SPLITS):
                before = parts + number * M * N + place
                total += tl.load(before, mask=inside, other=0.0, cache_modifier=".cg")
    if done:
        if BIAS:
            total += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
        there = lines.to(tl.int64)[None, :] * N + rows[:, None]
        real = (lines < M)[None, :] & (rows < N)[:, None]
        tl.store(out + there, total.to(out.dtype.element_ty), mask=real)
