"""A matrix times one vector, or each of a few, with what stands before and behind it: batch 1.

At one text a step is nothing but reading the weights once, so everything else is folded into that:
the norm before the product, bias, activation, gate and residual behind it. Few programs with many
rows each: the vector stays in registers, and the next rows are on their way while these are
multiplied.
"""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import activated, normalized, rounded


@triton.jit
def rows_of(w, rows, cols, N, K: tl.constexpr, KP: tl.constexpr):
    """A tile of the matrix, read once and never again."""
    inside = (rows < N)[:, None]
    if K % KP != 0:
        inside = inside & (cols < K)[None, :]
    places = rows.to(tl.int64)[:, None] * K + cols[None, :]
    return tl.load(w + places, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def product(tile, vector):
    return tl.sum(tile.to(tl.float32) * vector[None, :], 1)


@triton.jit
def finished(
    y, z, rows, inside, bias, res, out, N,
    GLU: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RES: tl.constexpr,
):  # fmt: skip
    """What becomes of the products `y` (and `z` of the rows of up), and where it is written."""
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
def normed_vector(
    x, gain, shift, cols, eps, K: tl.constexpr, NORM: tl.constexpr, weight, bias
):  # fmt: skip
    """The vector that is multiplied; `weight` and `bias` of the norm were read before the wait."""
    vector = tl.load(x + cols, mask=cols < K, other=0.0).to(tl.float32)
    if NORM != 0:
        vector = rounded(normalized(vector, cols < K, weight, bias, eps, K, NORM), x)
    return vector


@triton.jit
def gemv(
    x, gain, shift, w, bias, res, out, N, eps, X_LINE, RES_LINE, OUT_LINE,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, NORM: tl.constexpr, GLU: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RES: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [N] = W [N, K] · norm(x); with GLU act(W · x) * (U · x), U being the N rows below W; with
    RES added to `res`. KP is the power of two that holds K. Of several lines each has programs of
    its own, which do with it what they would do if it were alone."""
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    line = tl.program_id(1).to(tl.int64)
    x, res, out = x + line * X_LINE, res + line * RES_LINE, out + line * OUT_LINE
    start, stride = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, KP)
    rows = start * BN + tl.arange(0, BN)
    up = w + tl.cast(N, tl.int64) * K
    tile = rows_of(w, rows, cols, N, K, KP)
    if GLU:
        above = rows_of(up, rows, cols, N, K, KP)
    weight, offset = 0.0, 0.0
    if NORM != 0:
        weight = tl.load(gain + cols, mask=cols < K, other=0.0)
    if NORM == 2:
        offset = tl.load(shift + cols, mask=cols < K, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    vector = normed_vector(x, gain, shift, cols, eps, K, NORM, weight, offset)
    for block in range(start, tl.cdiv(N, BN), stride):
        behind = (block + stride) * BN + tl.arange(0, BN)
        next_tile = rows_of(w, behind, cols, N, K, KP)
        y = product(tile, vector)
        z = y
        if GLU:
            next_above = rows_of(up, behind, cols, N, K, KP)
            z = product(above, vector)
            above = next_above
        finished(y, z, rows, rows < N, bias, res, out, N, GLU, ACTIVATION, BIAS, RES)
        tile = next_tile
        rows = behind
