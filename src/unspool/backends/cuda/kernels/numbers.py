"""Small functions of numbers that kernels share."""

import triton
import triton.language as tl


@triton.jit
def ordered(x):
    """Floats as whole numbers (int32) in the same order; 0 and -0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def smooth_exp(x):
    """exp(x) in float32 to the last digit or two: exp2 of the rounded x·log2(e), and the rest."""
    whole = x * 1.4426950408889634
    rest = tl.fma(x, tl.full([], 1.4426950408889634, tl.float32), -whole)
    rest = rest + x * 1.925963033500862e-08
    power = tl.exp2(whole)
    return power + power * (rest * 0.6931471805599453)


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
