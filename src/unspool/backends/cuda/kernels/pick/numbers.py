"""Orderable floats, exponentials, and the random number of a draw."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_LOW = tl.constexpr(1.925963033500862e-08)  # LOG2E - float32(LOG2E)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def ordered(x):
    """Map floats to int32 in the same order; 0 and -0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """Inverse of `ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def power(x, base, base_low):
    """2 ** (x · (base + base_low)) in float32, within an ulp or two for very negative x too."""
    rounded = x * base
    error = tl.fma(x, tl.zeros_like(x) + base, -rounded) + x * base_low
    result = tl.exp2(rounded)
    return result + result * (error * LN2)


@triton.jit
def depth_below(x, peak):
    """peak - x; 0 if they are equal, even if infinite."""
    return tl.where(x == peak, 0.0, peak - x)


@triton.jit
def uniform(seed, sample, position):
    """The random number in [0,1) of `sampling/draw.py`: Philox4x32-10 of seed, sample, position."""
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
