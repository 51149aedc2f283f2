"""GEMV with fused norm, bias, activation, gate and residual: decode at batch size 1.

Decoding a single sequence is limited by reading the weights once, so all other operations are fused
into it. There are few programs with many rows each: the vector stays in registers, and the next
rows are loaded while the current ones are multiplied.
"""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import activated, normalized, rounded


@triton.jit
def load_rows(w, rows, cols, N, K: tl.constexpr, KP: tl.constexpr):
    """Load a tile of the matrix, which is read only once."""
    inside = (rows < N)[:, None]
    if K % KP != 0:
        inside = inside & (cols < K)[None, :]
    places = rows.to(tl.int64)[:, None] * K + cols[None, :]
    return tl.load(w + places, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def product(tile, vector):
    return tl.sum(tile.to(tl.float32) * vector[None, :], 1)


@triton.jit
def epilogue(
    y, z, rows, inside, bias, res, out, N,
    GLU: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RES: tl.constexpr,
):  # fmt: skip
    """Bias, activation, gate and residual of the products `y` (and `z` of the rows of up)."""
    if BIAS:
        y += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    y = rounded(y, out)
    if ACTIVATION != 0:
        y = rounded(activated(y, ACTIVATION), out)
    if GLU:
        if BIAS:
            z += tl.load(bias + N + rows, mask=inside, other=0.0).to(tl.float32)
        y *= rounded(z, out)
    if RES:
        y = rounded(y, out) + tl.load(res + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def load_vector(x, weight, bias, cols, eps, K: tl.constexpr, NORM: tl.constexpr):
    """Load and normalize the vector; `weight` and `bias` of the norm were loaded before."""
    vector = tl.load(x + cols, mask=cols < K, other=0.0).to(tl.float32)
    if NORM != 0:
        vector = rounded(normalized(vector, cols < K, weight, bias, eps, K, NORM), x)
    return vector


@triton.jit
def gemv_kernel(
    x, gain, shift, w, bias, res, out, N, eps, X_STRIDE, RES_STRIDE, OUT_STRIDE,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, NORM: tl.constexpr, GLU: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RES: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [N] = W [N, K] · norm(x); with GLU act(W · x) * (U · x), U being the N rows below W; with
    RES plus `res`. KP is the power of two >= K. Each vector has separate programs, so its result
    does not depend on the number of vectors.
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
    cols = tl.arange(0, KP)
    rows = start * BN + tl.arange(0, BN)
    up = w + tl.cast(N, tl.int64) * K
    tile = load_rows(w, rows, cols, N, K, KP)
    if GLU:
        up_tile = load_rows(up, rows, cols, N, K, KP)
    weight, offset = 0.0, 0.0
    if NORM != 0:
        weight = tl.load(gain + cols, mask=cols < K, other=0.0)
    if NORM == 2:
        offset = tl.load(shift + cols, mask=cols < K, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    vector = load_vector(x, weight, offset, cols, eps, K, NORM)
    for block in range(start, tl.cdiv(N, BN), stride):
        next_rows = (block + stride) * BN + tl.arange(0, BN)
        next_tile = load_rows(w, next_rows, cols, N, K, KP)
        y = product(tile, vector)
        z = y
        if GLU:
            next_up_tile = load_rows(up, next_rows, cols, N, K, KP)
            z = product(up_tile, vector)
            up_tile = next_up_tile
        epilogue(y, z, rows, rows < N, bias, res, out, N, GLU, ACTIVATION, BIAS, RES)
        tile = next_tile
        rows = next_rows
