"""A packed matrix times one vector, with what stands before and behind it: see `gemv.py`.

One vector of 16-bit floats is multiplied in whole numbers: what meets a unit becomes 16-bit numbers
times a step, in two bytes each, and one instruction (dp4a) adds up four products of bytes. That is
a third of the work of making floats of the weights, which would take longer than to read them. The
sums are exact, and the rounding is a small part of the vector's own. A vector of 32-bit floats
would lose by it: there the weights become floats.
"""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import rounded
from unspool.backends.cuda.kernels.gemv import finished
from unspool.backends.cuda.kernels.packed import fetched, magic, numbers, scale_and_minimum


@triton.jit
def spread(vector, units, SLOT: tl.constexpr, BITS: tl.constexpr, K: tl.constexpr):
    """The numbers of a vector that meet a slot, [units, 4]."""
    cols = units[:, None] * (128 // BITS) + 4 * SLOT + tl.arange(0, 4)[None, :]
    return tl.load(vector + cols, cols < K, 0.0).to(tl.float32)


@triton.jit
def normed_parts(
    given, gains, shifts, x, units, eps, K: tl.constexpr, BITS: tl.constexpr, NORM: tl.constexpr
):
    """The vector, spread over slots, after its norm."""
    parts = given
    if NORM != 0:
        mean = 0.0
        if NORM == 2:
            total = given[0]
            for slot in tl.static_range(1, 32 // BITS):
                total += given[slot]
            mean = tl.sum(total) / K
        squares = tl.zeros_like(given[0])
        for slot in tl.static_range(0, 32 // BITS):
            apart = given[slot] - mean
            if NORM == 2:
                cols = units[:, None] * (128 // BITS) + 4 * slot + tl.arange(0, 4)[None, :]
                apart = tl.where(cols < K, apart, 0.0)
            squares += apart * apart
        spreading = tl.rsqrt(tl.sum(squares) / K + eps)
        parts = ()
        for slot in tl.static_range(0, 32 // BITS):
            part = (given[slot] - mean) * spreading * gains[slot]
            if NORM == 2:
                part += shifts[slot]
            parts = parts + (rounded(part, x),)  # noqa: RUF005 (Triton knows no unpacking)
    return parts


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def bytes_of(a, b, c, d, SECOND: tl.constexpr, NATIVE: tl.constexpr):
    """The lowest or the second bytes of four numbers, as one number."""
    if NATIVE:
        if SECOND:
            code: tl.constexpr = """{ .reg .b32 t, u;
                prmt.b32 t, $1, $2, 0x51; prmt.b32 u, $3, $4, 0x51; prmt.b32 $0, t, u, 0x5410; }"""
        else:
            code: tl.constexpr = """{ .reg .b32 t, u;
                prmt.b32 t, $1, $2, 0x40; prmt.b32 u, $3, $4, 0x40; prmt.b32 $0, t, u, 0x5410; }"""
        found = tl.inline_asm_elementwise(
            code, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        SHIFT: tl.constexpr = 8 if SECOND else 0
        found = (a >> SHIFT) & 255
        found |= ((b >> SHIFT) & 255) << 8
        found |= ((c >> SHIFT) & 255) << 16
        found |= (d >> SHIFT) << 24
    return found


@triton.jit
def dot_bytes(weights, x, total, NATIVE: tl.constexpr):
    """`total` and four products: of bytes without a sign, and of bytes with one."""
    if NATIVE:
        total = tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [weights, x, total], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        for byte in tl.static_range(0, 4):
            total += ((weights >> (8 * byte)) & 255) * ((x << (24 - 8 * byte)) >> 24)
    return total


@triton.jit
def whole_numbers(parts, BITS: tl.constexpr, NATIVE: tl.constexpr):
    """A vector as 16-bit numbers: their upper and their lower bytes as they meet a word of a unit
    [units, 4] (two words each where a byte holds two weights), the step that they are multiples
    of, and their sum [units]."""
    SLOTS: tl.constexpr = 32 // BITS
    largest = tl.abs(parts[0])
    for slot in tl.static_range(1, SLOTS):
        largest = larger(largest, tl.abs(parts[slot]))
    largest = tl.reduce(largest, 1, larger)
    counts = 32512 / tl.maximum(largest, 1e-30)
    bits = ()
    for slot in tl.static_range(0, SLOTS):
        # The last bits of a float of this size are its whole part. With 128 more, the second byte
        # is rounded to the nearest, and the lowest is what remains, 128 too large.
        moved = parts[slot] * counts[:, None] + (12582912.0 + 128.0)
        bits = bits + (moved.to(tl.int32, bitcast=True),)  # noqa: RUF005
    upper, lower = (), ()
    EVERY: tl.constexpr = SLOTS // 4
    sums = tl.zeros((parts[0].shape[0],), tl.int32)
    for first in tl.static_range(0, EVERY):
        a, b = bits[first], bits[first + EVERY]
        c, d = bits[first + 2 * EVERY], bits[first + 3 * EVERY]
        high = bytes_of(a, b, c, d, True, NATIVE)
        low = bytes_of(a, b, c, d, False, NATIVE) ^ -0x7F7F7F80  # the upper bit of each byte
        upper = upper + (high,)  # noqa: RUF005
        lower = lower + (low,)  # noqa: RUF005
        ones = tl.full(high.shape, 0x01010101, tl.int32)
        nothing = tl.zeros_like(high)
        here = dot_bytes(ones, high, nothing, NATIVE) * 256 + dot_bytes(ones, low, nothing, NATIVE)
        sums += tl.sum(here, 1)
    return upper, lower, largest / 32512, sums


@triton.jit
def whole_product(tile, upper, lower, BITS: tl.constexpr, NATIVE: tl.constexpr):
    """The sums of whole numbers for each unit, [rows, units]."""
    nothing = tl.zeros_like(tile)
    if BITS == 4:
        even, odd = tile & 0x0F0F0F0F, (tile >> 4) & 0x0F0F0F0F
        high = dot_bytes(odd, upper[1][None, :, :], nothing, NATIVE)
        high = dot_bytes(even, upper[0][None, :, :], high, NATIVE)
        low = dot_bytes(odd, lower[1][None, :, :], high * 256, NATIVE)
        low = dot_bytes(even, lower[0][None, :, :], low, NATIVE)
    else:
        high = dot_bytes(tile, upper[0][None, :, :], nothing, NATIVE)
        low = dot_bytes(tile, lower[0][None, :, :], high * 256, NATIVE)
    return tl.sum(low, 2)


@triton.jit
def float_product(tile, parts, zero, BITS: tl.constexpr, KIND: tl.constexpr):
    """The sums of floats for each unit, [rows, units]."""
    found = numbers(tile, zero, 0, BITS, KIND) * parts[0][None, :, :]
    for slot in tl.static_range(1, 32 // BITS):
        found += numbers(tile, zero, slot, BITS, KIND) * parts[slot][None, :, :]
    return tl.sum(found, 2)


@triton.jit
def excess_and_sums(parts, BITS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr):
    """What a unit's sum of floats has too much, and the sum of the vector itself, [units]."""
    sums = tl.zeros((parts[0].shape[0],), tl.float32)
    excess = sums
    for slot in tl.static_range(0, 32 // BITS):
        here = tl.sum(parts[slot], 1)
        sums += here
        excess += here * (magic(slot, BITS, KIND) + OFFSET)
    return excess, sums


@triton.jit
def product(
    tile, record, factor, units, parts, upper, lower, step, sums, zero,
    BITS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, SHARE: tl.constexpr,
    WHOLE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Rows times the vector, [rows]. `sums` are those of the vector for each unit."""
    scale, minimum = scale_and_minimum(record, factor, units, KIND, SHARE)
    if WHOLE:
        found = whole_product(tile, upper, lower, BITS, NATIVE) - (OFFSET * sums)[None, :]
        total = scale * step[None, :] * found.to(tl.float32)
    else:
        total = scale * (float_product(tile, parts, zero, BITS, KIND) - step[None, :])
    if KIND == 1 or KIND == 2:
        if WHOLE:
            total -= minimum * (step * sums.to(tl.float32))[None, :]
        else:
            total -= minimum * sums[None, :]
    return tl.sum(total, 1)


@triton.jit
def block_rows(block, N, BN: tl.constexpr, GLU: tl.constexpr):
    """The rows that are multiplied together; with GLU each is followed by its row of up."""
    if GLU:
        number = tl.arange(0, 2 * BN)
        rows = block * BN + number // 2
        rows = tl.where(rows < N, rows + number % 2 * N, 2 * N)
    else:
        rows = block * BN + tl.arange(0, BN)
    return rows


@triton.jit
def prepared(
    given, gains, shifts, x, units, eps, K: tl.constexpr, BITS: tl.constexpr, NORM: tl.constexpr,
    LATER: tl.constexpr,
):  # fmt: skip
    """The vector after its norm, spread over slots, and what its products are to be multiplied
    with: with LATER the whole vector's root, which need not be known before."""
    root = 1.0
    if LATER:
        parts = ()
        squares = tl.zeros_like(given[0])
        for slot in tl.static_range(0, 32 // BITS):
            squares += given[slot] * given[slot]
            parts = parts + (given[slot] * gains[slot],)  # noqa: RUF005
        root = tl.rsqrt(tl.sum(squares) / K + eps)
    else:
        parts = normed_parts(given, gains, shifts, x, units, eps, K, BITS, NORM)
    return parts, root


@triton.jit
def packed_gemv(
    x, gain, shift, quants, records, factors, bias, res, out, N, eps, X_LINE, RES_LINE, OUT_LINE,
    K: tl.constexpr, U: tl.constexpr, UP: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, SHARE: tl.constexpr, BN: tl.constexpr,
    NORM: tl.constexpr, GLU: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    RES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """As `gemv`, with a packed matrix of U units a row (UP: the power of two that holds them).
    NATIVE: on a GPU, where there are instructions for bytes."""
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    line = tl.program_id(1).to(tl.int64)
    x, res, out = x + line * X_LINE, res + line * RES_LINE, out + line * OUT_LINE
    start, stride = tl.program_id(0), tl.num_programs(0)
    units, whole_height = tl.arange(0, UP), N * (1 + GLU)
    tile, record, factor = fetched(
        quants, records, factors, block_rows(start, N, BN, GLU), units, whole_height, U, BITS, KIND,
        SHARE,
    )  # fmt: skip
    gains, shifts = (), ()
    for slot in tl.static_range(0, 32 // BITS):
        if NORM != 0:
            gains = gains + (spread(gain, units, slot, BITS, K),)  # noqa: RUF005
        if NORM == 2:
            shifts = shifts + (spread(shift, units, slot, BITS, K),)  # noqa: RUF005
    if PDL:
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    given = ()
    for slot in tl.static_range(0, 32 // BITS):
        given = given + (spread(x, units, slot, BITS, K),)  # noqa: RUF005
    WHOLE: tl.constexpr = KIND != 4 and x.dtype.element_ty.primitive_bitwidth == 16
    parts, root = prepared(given, gains, shifts, x, units, eps, K, BITS, NORM, WHOLE and NORM == 1)
    upper, lower = parts, parts
    if WHOLE:
        upper, lower, step, sums = whole_numbers(parts, BITS, NATIVE)
        step *= root
    else:
        step, sums = excess_and_sums(parts, BITS, KIND, OFFSET)
    zero = tl.minimum(N, 0)
    for block in range(start, tl.cdiv(N, BN), stride):
        next_tile, next_record, next_factor = fetched(
            quants, records, factors, block_rows(block + stride, N, BN, GLU), units, whole_height,
            U, BITS, KIND, SHARE,
        )  # fmt: skip
        y = product(
            tile, record, factor, units, parts, upper, lower, step, sums, zero, BITS, KIND, OFFSET,
            SHARE, WHOLE, NATIVE,
        )  # fmt: skip
        z = y
        if GLU:
            y, z = tl.split(tl.reshape(y, [BN, 2]))
        rows = block * BN + tl.arange(0, BN)
        finished(y, z, rows, rows < N, bias, res, out, N, GLU, ACTIVATION, BIAS, RES)
        tile, record, factor = next_tile, next_record, next_factor
