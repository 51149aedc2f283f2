"""Numbers: floats in order, exponentials, the draw."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.925963033500862e-08)  # what float32 leaves of it
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def ordered(x):
    """Floats as whole numbers (int32) in the same order; 0 and -0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """The float that `ordered` gives this whole number."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def power(x, base, rest):
    """2 ** (x · (base + rest)) in float32, good to the last digit or two for x far below 0 too."""
    whole = x * base
    left = tl.fma(x, tl.zeros_like(x) + base, -whole) + x * rest
    result = tl.exp2(whole)
    return result + result * (left * LN2)


@triton.jit
def depth_below(x, peak):
    """How far below the peak; 0 for what equals it, infinite peaks too."""
    return tl.where(x == peak, 0.0, peak - x)


@triton.jit
def uniform(seed, sample, position):
    """The number in [0,1) of `sampling/draw.py`: Philox4x32-10 of seed, sample and position."""
    word = tl.full([], 0xFFFFFFFF, tl.uint64)
    first = tl.full([], 0xD2511F53, tl.uint64)
    second = tl.full([], 0xCD9E8D57, tl.uint64)
    c0 = position.to(tl.uint64) & word
    c1 = sample.to(tl.uint64) & word
    c2 = sample.to(tl.uint64) >> 32
    c3 = tl.full([], 0, tl.uint64)
    k0 = seed.to(tl.uint64) & word
    k1 = seed.to(tl.uint64) >> 32
    for _ in range(10):
        p0 = c0 * first
        p1 = c2 * second
        c0 = (p1 >> 32) ^ c1 ^ k0
        c1 = p1 & word
        c2 = (p0 >> 32) ^ c3 ^ k1
        c3 = p0 & word
        k0 = (k0 + tl.full([], 0x9E3779B9, tl.uint64)) & word
        k1 = (k1 + tl.full([], 0xBB67AE85, tl.uint64)) & word
    bits = ((c0 << 32) | c1) >> 11
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16
