"""GEMM with a fixed order of summation: bit-identical results for any batch size.

The columns are divided into SPLITS parts of fixed length. Each part is summed on tensor cores, BK
columns at a time from left to right, and the partial sums are added in order: by one program for
large batches, by the last of several programs (split-K) for small ones.
"""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import wait


@triton.jit
def _partial_sum(
    x, w, rows, batch_rows, first, last, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """W · xᵀ over the columns from `first` to `last`: [BN, BM]."""
    sums = tl.zeros((BN, BM), tl.float32)
    for at in tl.range(first, last, BK, num_stages=STAGES):
        cols = at + tl.arange(0, BK)
        inside = (rows < N)[:, None]
        in_batch = (batch_rows < M)[None, :]
        if K % BK != 0:
            inside = inside & (cols < K)[None, :]
            in_batch = in_batch & (cols < K)[:, None]
        tile = tl.load(w + rows.to(tl.int64)[:, None] * K + cols[None, :], mask=inside, other=0.0)
        x_tile = tl.load(
            x + batch_rows.to(tl.int64)[None, :] * K + cols[:, None], mask=in_batch, other=0.0
        )
        sums = tl.dot(tile, x_tile, sums, input_precision="ieee")
    return sums


@triton.jit
def exact_gemm_kernel(
    x, w, bias, out, parts, arrived, M, N,
    K: tl.constexpr, SPLITS: tl.constexpr, ONE_PROGRAM: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x [M, K] · Wᵀ + bias. ONE_PROGRAM: one program sums all parts of its tile."""
    LENGTH: tl.constexpr = ((K + BK - 1) // BK + SPLITS - 1) // SPLITS * BK  # columns of a part
    tile, column = tl.program_id(0), tl.program_id(1)
    rows, batch_rows = tile * BN + tl.arange(0, BN), column * BM + tl.arange(0, BM)
    wait(PDL)
    total = tl.zeros((BN, BM), tl.float32)
    is_last = True
    if ONE_PROGRAM:
        for split in range(SPLITS):
            first = split * LENGTH
            last = tl.minimum(first + LENGTH, K)
            total += _partial_sum(x, w, rows, batch_rows, first, last, M, N, K, BM, BN, BK, STAGES)
    else:
        split = tl.program_id(2)
        first = split * LENGTH
        last = tl.minimum(first + LENGTH, K)
        sums = _partial_sum(x, w, rows, batch_rows, first, last, M, N, K, BM, BN, BK, STAGES)
        offsets = batch_rows[None, :] * N + rows[:, None]
        inside = (batch_rows < M)[None, :] & (rows < N)[:, None]
        tl.store(parts + split * M * N + offsets, sums, mask=inside)
        tl.debug_barrier()
        counter = arrived + column * tl.num_programs(0) + tile
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.store(counter, 0)
            for number in range(SPLITS):
                partial = parts + number * M * N + offsets
                total += tl.load(partial, mask=inside, other=0.0, cache_modifier=".cg")
    if is_last:
        if BIAS:
            total += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
        out_offsets = batch_rows.to(tl.int64)[None, :] * N + rows[:, None]
        is_valid = (batch_rows < M)[None, :] & (rows < N)[:, None]
        tl.store(out + out_offsets, total.to(out.dtype.element_ty), mask=is_valid)
