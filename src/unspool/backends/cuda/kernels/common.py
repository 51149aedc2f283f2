"""Functions shared by the kernels.

With programmatic dependent launch (PDL) a kernel may start before the previous one has ended: it
loads its weights, waits, and only then reads the output of the previous kernel.
"""

import triton
import triton.language as tl

ACTIVATIONS = {
    "none": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "relu2": 5, "swiglu_clamped": 6,
    "sigmoid": 7,
}  # fmt: skip
NO_NORM, RMS, LAYER = 0, 1, 2


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the previous kernel; allow the next one to start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def rounded(x, target):
    """Round float32 to the dtype of pointer `target`, and back."""
    return x.to(target.dtype.element_ty).to(tl.float32)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Activation in float32; ACTIVATION is a value of `ACTIVATIONS`."""
    if ACTIVATION == 1:
        x = x / (1.0 + tl.exp(-x))
    if ACTIVATION == 2:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if ACTIVATION == 3:  # tanh(z) is 2 / (1 + exp(-2 z)) - 1
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + tl.exp(-2.0 * z))
    if ACTIVATION == 4:
        x = tl.maximum(x, 0.0)
    if ACTIVATION == 5:
        x = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
        x = x * x
    if ACTIVATION == 7:
        x = 1.0 / (1.0 + tl.exp(-x))
    return x


@triton.jit
def gated_activation(gate, up, target, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """Combine gate and up projection in float32; `target`: see `rounded`.

    LIMIT: the clamp of "swiglu_clamped".
    """
    if ACTIVATION == 6:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        y = (up + 1.0) * (gate / (1.0 + tl.exp(-1.702 * gate)))
    else:
        y = rounded(activated(gate, ACTIVATION), target) * up
    return y


# -- Vectors in parts: tuples of tensors, with the columns of each part in `cols`


@triton.jit
def load_parts(vector, cols, K: tl.constexpr, PARTS: tl.constexpr):
    """Load a vector of K numbers in float32."""
    parts = ()
    for n in tl.static_range(PARTS):
        part = tl.load(vector + cols[n], mask=cols[n] < K, other=0.0).to(tl.float32)
        parts = parts + (part,)  # noqa: RUF005 (Triton has no unpacking)
    return parts


@triton.jit
def load_norm(gain, shift, cols, K: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr):
    """Load gain and shift of a norm, as far as it has them."""
    gains, shifts = (), ()
    if NORM != 0:
        gains = load_parts(gain, cols, K, PARTS)
    if NORM == 2:
        shifts = load_parts(shift, cols, K, PARTS)
    return gains, shifts


@triton.jit
def sum_parts(parts, PARTS: tl.constexpr):
    """Sum of all numbers; parts of one shape are added before they are reduced."""
    total, others = parts[0], 0.0
    for n in tl.static_range(1, PARTS):
        if parts[n].numel == parts[0].numel:
            total += parts[n]
        else:
            others += tl.sum(parts[n])
    return tl.sum(total) + others


@triton.jit
def normalize_parts(
    parts, gains, shifts, cols, target, eps, K: tl.constexpr, NORM: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """RMSNorm or LayerNorm (NORM) of a vector; `target`: see `rounded`."""
    normed = parts
    if NORM != 0:
        mean = 0.0
        if NORM == 2:
            mean = sum_parts(parts, PARTS) / K
        squares, normed = (), ()
        for n in tl.static_range(PARTS):
            centered = parts[n] - mean
            if NORM == 2:
                centered = tl.where(cols[n] < K, centered, 0.0)
            squares = squares + (centered * centered,)  # noqa: RUF005
        inv_std = tl.rsqrt(sum_parts(squares, PARTS) / K + eps)
        for n in tl.static_range(PARTS):
            part = (parts[n] - mean) * inv_std * gains[n]
            if NORM == 2:
                part += shifts[n]
            normed = normed + (rounded(part, target),)  # noqa: RUF005
    return normed


@triton.jit
def add_to_residual(
    parts, first, second, post_gains, post_shifts, cols, eps, added_scale, scale,
    K: tl.constexpr, ADDED: tl.constexpr, POST: tl.constexpr, SCALED: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """A vector + first + second (ADDED vectors; POST: norm of `first`).

    SCALED: (vector + added_scale * (first + second)) * scale.
    """
    added = parts
    if ADDED > 0:
        added = load_parts(first, cols, K, PARTS)
        added = normalize_parts(added, post_gains, post_shifts, cols, first, eps, K, POST, PARTS)
    others = added
    if ADDED > 1:
        others = load_parts(second, cols, K, PARTS)
    sums = ()
    for n in tl.static_range(PARTS):
        x, y, z = parts[n], added[n], others[n]
        if SCALED:
            y, z = rounded(y * added_scale, first), rounded(z * added_scale, first)
        if ADDED > 0:
            x = rounded(x + y, first)
        if ADDED > 1:
            x = rounded(x + z, first)
        if SCALED:
            x = rounded(x * scale, first)
        sums = sums + (x,)  # noqa: RUF005
    return sums


@triton.jit
def store_parts(vector, parts, cols, K: tl.constexpr, PARTS: tl.constexpr):
    for n in tl.static_range(PARTS):
        tl.store(vector + cols[n], parts[n].to(vector.dtype.element_ty), mask=cols[n] < K)
