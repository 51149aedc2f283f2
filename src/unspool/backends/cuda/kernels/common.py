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


@triton.jit
def normalized(x, inside, gain, shift, eps, D: tl.constexpr, NORM: tl.constexpr):
    """RMSNorm or LayerNorm of a vector in float32 that is zero where not `inside`."""
    if NORM == 2:
        mean = tl.sum(x, 0) / D
        x = tl.where(inside, x - mean, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * gain
    if NORM == 2:
        x += shift
    return x
