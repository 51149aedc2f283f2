"""GEMV with fused norm, bias, activation, gate and residual: decode at batch size 1.

Decoding a single sequence is limited by reading the weights once, so all other operations are fused
into it. There are few programs with many rows each: the vector stays in registers, and the next
rows are loaded while the current ones are multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import (
    activated,
    add_to_residual,
    gated_activation,
    load_norm,
    load_parts,
    normalize_parts,
    rounded,
    store_parts,
    wait,
)


@triton.jit
def load_rows(w, rows, cols, N, K: tl.constexpr, MASKED: tl.constexpr):
    """Load a tile of the matrix, which is read only once."""
    inside = (rows < N)[:, None]
    if MASKED:
        inside = inside & (cols < K)[None, :]
    places = rows.to(tl.int64)[:, None] * K + cols[None, :]
    return tl.load(w + places, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def product(tile, vector):
    return tl.sum(tile.to(tl.float32) * vector[None, :], 1)


@triton.jit
def epilogue(
    y, z, rows, inside, bias, res, out, scale, N,
    GLU: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RES: tl.constexpr,
    SCALED: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Bias, activation, gate and residual of the products `y` (and `z` of the rows of up).

    RES: 1 adds `res`, 2 multiplies by it.
    """
    if BIAS:
        y += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    y = rounded(y, out)
    if GLU:
        if BIAS:
            z += tl.load(bias + N + rows, mask=inside, other=0.0).to(tl.float32)
        y = gated_activation(y, rounded(z, out), out, ACTIVATION, LIMIT)
    elif ACTIVATION != 0:
        y = activated(y, ACTIVATION)
    if SCALED:
        y = rounded(y, out) * scale
    if RES != 0:
        other = tl.load(res + rows, mask=inside, other=0.0).to(tl.float32)
        y = rounded(y, out) + other if RES == 1 else rounded(y, out) * other
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gemv_kernel(
    x, first, second, sums, post_gain, post_shift, gain, shift, w, bias, res, out, N, eps,
    added_scale, sum_scale, scale, X_STRIDE, RES_STRIDE, OUT_STRIDE, K: tl.constexpr,
    KP: tl.constexpr, TAIL: tl.constexpr, BN: tl.constexpr, ADDED: tl.constexpr, POST: tl.constexpr,
    SUM_SCALED: tl.constexpr, NORM: tl.constexpr, GLU: tl.constexpr, ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr, RES: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr, LIMIT: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """out [N] = W [N, K] · norm(x); with GLU act(W · x) * (U · x), U being the N rows below W; RES:
    see `epilogue`. Each vector has separate programs, so its result does not depend on the number
    of vectors.

    KP is the power of two >= K; or the largest one < K, and TAIL (not with GLU) is a power of two
    that holds the rest of the columns.

    ADDED: `add_to_residual` comes first, in every program; the first one stores it in `sums`.

    LOOP: a program may have several blocks of rows, and loads the next one ahead. Programs without
    it have fewer registers, so that more of the next kernel's programs wait beside them.
    """
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    vector_index = tl.program_id(1).to(tl.int64)
    x, res, out = (
        x + vector_index * X_STRIDE,
        res + vector_index * RES_STRIDE,
        out + vector_index * OUT_STRIDE,
    )
    start, stride = tl.program_id(0), tl.num_programs(0)
    PARTS: tl.constexpr = 2 if TAIL > 0 else 1
    MASKED: tl.constexpr = KP > K
    TAIL_MASKED: tl.constexpr = KP + TAIL > K
    cols = (tl.arange(0, KP),)
    if TAIL > 0:
        cols = (cols[0], KP + tl.arange(0, TAIL))
    rows = start * BN + tl.arange(0, BN)
    up = w + tl.cast(N, tl.int64) * K
    tile = load_rows(w, rows, cols[0], N, K, MASKED)
    if TAIL > 0:
        tail_tile = load_rows(w, rows, cols[1], N, K, TAIL_MASKED)
    if GLU:
        up_tile = load_rows(up, rows, cols[0], N, K, MASKED)
    gains, shifts = load_norm(gain, shift, cols, K, NORM, PARTS)
    post_gains, post_shifts = load_norm(post_gain, post_shift, cols, K, POST, PARTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    vector = load_parts(x, cols, K, PARTS)
    if ADDED > 0:
        at = vector_index * K
        vector = add_to_residual(
            vector, first + at, second + at, post_gains, post_shifts, cols, eps, added_scale,
            sum_scale, K, ADDED, POST, SUM_SCALED, PARTS,
        )  # fmt: skip
        if start == 0:
            store_parts(sums + at, vector, cols, K, PARTS)
    vector = normalize_parts(vector, gains, shifts, cols, x, eps, K, NORM, PARTS)
    for block in range(start, tl.cdiv(N, BN), stride):
        next_rows = (block + stride) * BN + tl.arange(0, BN)
        next_tile = load_rows(w, next_rows, cols[0], N, K, MASKED) if LOOP else tile
        y = product(tile, vector[0])
        if TAIL > 0:
            next_tail_tile = tail_tile
            if LOOP:
                next_tail_tile = load_rows(w, next_rows, cols[1], N, K, TAIL_MASKED)
            y += product(tail_tile, vector[1])
            tail_tile = next_tail_tile
        z = y
        if GLU:
            next_up_tile = load_rows(up, next_rows, cols[0], N, K, MASKED) if LOOP else up_tile
            z = product(up_tile, vector[0])
            up_tile = next_up_tile
        epilogue(
            y, z, rows, rows < N, bias, res, out, scale, N, GLU, ACTIVATION, BIAS, RES, SCALED,
            LIMIT,
        )  # fmt: skip
        tile = next_tile
        rows = next_rows


@triton.jit(do_not_specialize=["M"])
def ordered_gemm_kernel(
    x, w, bias, out, M, N, OUT_STRIDE,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x [M, K] · Wᵀ + bias. One program sums all columns of its tile in order, so the
    sizes of tiles do not change the bits."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    batch_rows = tl.program_id(1) * BM + tl.arange(0, BM)
    is_row, in_batch = (rows < N)[:, None], (batch_rows < M)[None, :]
    tiles, x_tiles = w + rows.to(tl.int64)[:, None] * K, x + batch_rows.to(tl.int64)[None, :] * K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BN, BM), tl.float32)
    for at in tl.range(0, K, BK, num_stages=STAGES):
        cols = at + tl.arange(0, BK)
        inside, in_x = is_row, in_batch
        if K % BK != 0:
            inside, in_x = is_row & (cols < K)[None, :], in_batch & (cols < K)[:, None]
        tile = tl.load(tiles + cols[None, :], mask=inside, other=0.0)
        x_tile = tl.load(x_tiles + cols[:, None], mask=in_x, other=0.0)
        total = tl.dot(tile, x_tile, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    out_offsets = batch_rows.to(tl.int64)[None, :] * OUT_STRIDE + rows[:, None]
    tl.store(out + out_offsets, total.to(out.dtype.element_ty), mask=in_batch & is_row)


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
    low, up, slots, out, SECOND, THIRD, FOURTH, N: tl.constexpr, R: tl.constexpr,
    PARTS: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [batch, N] += up [slot, N, R] · low [batch, PARTS * R].

    For fused matrices: rows from SECOND on use the second R columns of `low`, and so on.
    """
    wait(PDL)
    batch_row = tl.program_id(0).to(tl.int64)
    rows, ranks = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, R)
    slot = tl.load(slots + batch_row).to(tl.int64)
    if slot > 0:
        inside = rows < N
        part = (rows >= SECOND).to(tl.int32) + (rows >= THIRD).to(tl.int32)
        part += (rows >= FOURTH).to(tl.int32)
        columns = part[:, None] * R + ranks[None, :]
        low_part = tl.load(low + batch_row * (PARTS * R) + columns, mask=inside[:, None], other=0.0)
        weights = up + (slot * N + rows[:, None]) * R + ranks[None, :]
        up_part = tl.load(weights, mask=inside[:, None], other=0.0).to(tl.float32)
        out_ptr = out + batch_row * N + rows
        sums = tl.load(out_ptr, mask=inside, other=0.0).to(tl.float32) + tl.sum(
            up_part * low_part, 1
        )
        tl.store(out_ptr, sums.to(out.dtype.element_ty), mask=inside)
