"""Pieces that several kernels share.

A kernel may be launched before the one ahead of it has ended (programmatic dependent launch, PDL):
it asks for its weights, waits, and only then reads what the one ahead wrote.
"""

import triton
import triton.language as tl

ACTIVATIONS = {"none": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
NO_NORM, RMS, LAYER = 0, 1, 2


@triton.jit
def wait(PDL: tl.constexpr):
    """The kernel ahead is done; the one behind may come up."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def rounded(x, like):
    """A 32-bit number as it would be after a trip through memory in the type of `like`."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """In 32 bits; ACTIVATION is one of `ACTIVATIONS`."""
    if ACTIVATION == 1:
        x = x / (1.0 + tl.exp(-x))
    if ACTIVATION == 2:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if ACTIVATION == 3:  # tanh(z) is 2 / (1 + exp(-2 z)) - 1
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + tl.exp(-2.0 * z))
    if ACTIVATION == 4:
        x = tl.maximum(x, 0.0)
    return x


@triton.jit
def normalized(x, inside, gain, shift, eps, D: tl.constexpr, NORM: tl.constexpr):
    """RMSNorm or LayerNorm of one vector in 32 bits, whose places outside are zero."""
    if NORM == 2:
        mean = tl.sum(x, 0) / D
        x = tl.where(inside, x - mean, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * gain
    if NORM == 2:
        x += shift
    return x
