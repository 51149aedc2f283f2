"""Packed (quantized) matrices, dequantized in registers.

A row is divided into units of 16 bytes, one load of a thread: 32 weights of 4 bits or 16 of 8. The
columns of a unit form slots of four neighbours; weight j of slot s is in word j of the unit's four
words, shifted left by BITS * s. So one mask extracts a slot from the four words, and it is
multiplied with four neighbouring numbers of the vector.

A quantized number q means  scale * (q - OFFSET) - minimum.  Scale and minimum come from a record of
two or four bytes that one or two units share (`KIND`, see `PackedLayout`), and from two factors per
256 columns for types with super-blocks. FP8 (KIND 4) has one scale per row or per SHARE units.

MXFP4 (KIND 5) and NVFP4 (KIND 6) have 4-bit floats (e2m1: sign, two exponent bits, one fraction
bit) that mean  scale * doubled value.  The scale of MXFP4 is a power of two per unit, in a record
of one byte. NVFP4 has an e4m3 scale for each half of a unit, and a float32 factor per row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import (
    add_to_residual,
    normalize_parts,
    store_parts,
)
from unspool.backends.cuda.kernels.gemv import epilogue

HALF, HALVES, SUPER, SIGNED, FLOAT8, MXFP4, NVFP4 = 0, 1, 2, 3, 4, 5, 6


@triton.jit
def load_units(
    quants, records, factors, rows, units, N, U: tl.constexpr, BITS: tl.constexpr,
    KIND: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Load units of some rows [rows, units, 4], with the words that hold their records (FP8: their
    scales) and factors [rows, units]."""
    inside = (rows < N)[:, None] & (units < U)[None, :]
    return load_units_at(
        quants, records, factors, tl.zeros_like(units), rows.to(tl.int64), units, inside, U, BITS,
        KIND, SHARE,
    )  # fmt: skip


@triton.jit
def load_units_at(
    quants, records, factors, first, rows, units, inside, U: tl.constexpr, BITS: tl.constexpr,
    KIND: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """`load_units` of several matrices: unit n is in rows first[n] + `rows`."""
    word = tl.arange(0, 4)[None, None, :]
    offsets = ((first * U + units)[None, :] + (rows * U)[:, None])[:, :, None] * 4 + word
    tile = tl.load(quants + offsets, inside[:, :, None], 0, eviction_policy="evict_first")
    GROUPS: tl.constexpr = (U + SHARE - 1) // SHARE
    if KIND == 4:
        at = (first * GROUPS + units // SHARE)[None, :] + (rows * GROUPS)[:, None]
        record = tl.load(factors + at, inside, 0.0)
    else:
        PER_WORD: tl.constexpr = 1 if KIND == 1 else (4 if KIND == 5 else 2)  # records in a word
        WORDS: tl.constexpr = (GROUPS + PER_WORD - 1) // PER_WORD
        at = (first * WORDS + units // (SHARE * PER_WORD))[None, :] + (rows * WORDS)[:, None]
        record = tl.load(records + at, inside, 0)
    factor = record
    if KIND == 2 or KIND == 3:
        FACTOR_UNITS: tl.constexpr = 2 * BITS  # units in 256 columns
        FACTORS: tl.constexpr = (U + FACTOR_UNITS - 1) // FACTOR_UNITS
        at = (first * FACTORS + units // FACTOR_UNITS)[None, :] + (rows * FACTORS)[:, None]
        factor = tl.load(factors + at, inside, 0)
    if KIND == 6:
        factor = tl.load(factors + (first[None, :] + rows[:, None]), inside, 0.0)
    return tile, record, factor


@triton.jit
def half_float(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_and_minimum(record, factor, units, KIND: tl.constexpr, SHARE: tl.constexpr):
    """Scale and minimum (NVFP4: scales of the two halves) in float32, [rows, units] each."""
    minimum = 0.0
    if KIND == 0 or KIND == 2 or KIND == 3 or KIND == 6:  # two records in a word
        record = record >> (16 * (units // SHARE % 2))[None, :]
    if KIND == 0:
        scale = half_float(record)
    elif KIND == 1:
        scale, minimum = half_float(record), half_float(record >> 16)
    elif KIND == 2:
        scale = half_float(factor) * (record & 255).to(tl.float32)
        minimum = half_float(factor >> 16) * ((record >> 8) & 255).to(tl.float32)
    elif KIND == 3:
        byte = (record >> (8 * (units % 2))[None, :]) & 255  # two signed bytes, one for each unit
        scale = half_float(factor) * ((byte ^ 128) - 128).to(tl.float32)
    elif KIND == 4:
        scale = record
    elif KIND == 5:  # half of 2 ** (byte - 127), as the values are doubled
        byte = (record >> (8 * (units % 4))[None, :]) & 255
        bits = tl.where(byte < 2, 0x00200000 << byte, (byte - 1) << 23)
        scale = bits.to(tl.float32, bitcast=True)
    else:  # the bits of an e4m3 are those of a float16, times 2 ** 8; halved as above
        scale = half_float((record & 127) << 7) * 128.0
        minimum = half_float((record >> 8 & 127) << 7) * 128.0
    return scale, minimum


@triton.jit
def magic(SLOT: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr):
    """Constant that `slot_numbers` adds to each number of a slot."""
    return 0.0 if KIND >= 4 else (16.0 if BITS == 4 and SLOT % 2 == 1 else 256.0)


@triton.jit
def slot_numbers(words, zero, SLOT: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr):
    """Numbers of a slot [rows, units, 4] as floats: `magic` + q.

    The bits of q are shifted into the mantissa of 16.0 or 256.0: faster than a conversion, and
    precise enough for float32 sums. `zero` is not a compile-time constant, so the float's upper
    bits stay in a register and one instruction (lop3) does both the masking and the or.
    """
    FIRST: tl.constexpr = BITS * (SLOT // 2 * 2) if BITS == 4 else BITS * SLOT
    if KIND == 4:
        values = (words >> FIRST).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif KIND >= 5:  # a float32 whose exponent has the lowest two bits only
        bits = ((words << (28 - 4 * SLOT)) >> 6) & -0x7E400000
        values = bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38  # 2 ** 127
    else:
        moved = words << (15 - FIRST) if FIRST < 15 else words >> (FIRST - 15)
        if BITS == 8:
            bits = (moved & 0x7F8000) | (0x43800000 + zero)
        elif SLOT % 2 == 0:
            bits = (moved & 0x78000) | (0x43800000 + zero)
        else:
            bits = (moved & 0x780000) | (0x41800000 + zero)
        values = bits.to(tl.float32, bitcast=True)
    return values


@triton.jit
def dequantize_slot(
    tile, scale, minimum, factor, zero, SLOT: tl.constexpr, BITS: tl.constexpr,
    KIND: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Dequantized weights of a slot, [rows, units, 4]."""
    q = slot_numbers(tile, zero, SLOT, BITS, KIND) - (magic(SLOT, BITS, KIND) + OFFSET)
    if KIND == 6:
        values = q * (minimum if SLOT >= 4 else scale)[:, :, None] * factor[:, :, None]
    else:
        values = q * scale[:, :, None]
    if KIND == 1 or KIND == 2:
        values -= minimum[:, :, None]
    return values


@triton.jit
def dequantize_rows(
    tile, record, factor, units, zero, target, BN: tl.constexpr, BU: tl.constexpr,
    BITS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Dequantized weights of some units [rows, columns], in the dtype of pointer `target`."""
    scale, minimum = scale_and_minimum(record, factor, units, KIND, SHARE)
    slots = ()
    for slot in tl.static_range(0, 32 // BITS):
        values = dequantize_slot(tile, scale, minimum, factor, zero, slot, BITS, KIND, OFFSET)
        slots = slots + (values.to(target.dtype.element_ty),)  # noqa: RUF005
    # Each join adds one bit of the slot's number as the last axis, highest bit first.
    if BITS == 4:
        even = tl.join(tl.join(slots[0], slots[4]), tl.join(slots[2], slots[6]))
        odd = tl.join(tl.join(slots[1], slots[5]), tl.join(slots[3], slots[7]))
        merged = tl.permute(tl.join(even, odd), [0, 1, 3, 4, 5, 2])
    else:
        joined = tl.join(tl.join(slots[0], slots[2]), tl.join(slots[1], slots[3]))
        merged = tl.permute(joined, [0, 1, 3, 4, 2])
    return tl.reshape(merged, [BN, BU * (128 // BITS)])


@triton.jit
def dequantize_rows_kernel(
    quants, records, factors, tokens, previous, out, first, N,
    U: tl.constexpr, BU: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, SHARE: tl.constexpr, BN: tl.constexpr,
    CHOSEN: tl.constexpr,
):  # fmt: skip
    """Dequantize rows from `first` to N, BN rows by BU units per program.

    With CHOSEN, output row n is the row of token n; a token -1 - n is pick n of the previous step.
    """
    out_rows = tl.program_id(0) * BN + tl.arange(0, BN)
    units = tl.program_id(1) * BU + tl.arange(0, BU)
    rows = first + out_rows
    if CHOSEN:
        rows = tl.load(tokens + out_rows)
        rows = tl.where(rows < 0, tl.load(previous - 1 - rows, rows < 0, 0), rows)
        rows = tl.minimum(tl.maximum(rows, 0), N - 1)  # a failed pick: the host drops its row
    tile, record, factor = load_units(
        quants, records, factors, rows, units, N, U, BITS, KIND, SHARE
    )
    SIZE: tl.constexpr = 128 // BITS
    values = dequantize_rows(
        tile, record, factor, units, tl.minimum(N, 0), out, BN, BU, BITS, KIND, OFFSET, SHARE
    )
    cols = tl.program_id(1) * BU * SIZE + tl.arange(0, BU * SIZE)
    inside = (rows < N)[:, None] & (cols < U * SIZE)[None, :]
    tl.store(out + out_rows.to(tl.int64)[:, None] * (U * SIZE) + cols[None, :], values, inside)


@triton.jit(do_not_specialize=["M"])
def packed_gemm(
    x, quants, records, factors, bias, out, M, N, WIDE,
    K: tl.constexpr, U: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, SHARE: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, BU: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x [M, K] · Wᵀ on tensor cores, with a fixed order of summation for any M.

    W is dequantized to the dtype of x; WIDE is the row stride of `out`.
    """
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    out_rows = tl.program_id(1) * BM + tl.arange(0, BM)
    total = tl.zeros((BN, BM), tl.float32)
    x_rows = x + out_rows.to(tl.int64)[None, :] * K
    within, zero = tl.arange(0, BU * (128 // BITS)), tl.minimum(N, 0)
    for at in tl.range(0, U, BU, num_stages=3):
        units = at + tl.arange(0, BU)
        tile, record, factor = load_units(
            quants, records, factors, rows, units, N, U, BITS, KIND, SHARE
        )
        cols = at * (128 // BITS) + within
        x_mask = (cols < K)[:, None] & (out_rows < M)[None, :]
        x_tile = tl.load(x_rows + cols[:, None], mask=x_mask, other=0.0)
        values = dequantize_rows(
            tile, record, factor, units, zero, x, BN, BU, BITS, KIND, OFFSET, SHARE
        )
        total = tl.dot(values, x_tile, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + rows, rows < N, 0.0).to(tl.float32)[:, None]
    at = out_rows.to(tl.int64)[None, :] * WIDE + rows[:, None]
    inside = (out_rows < M)[None, :] & (rows < N)[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


# -- GEMV with a packed (quantized) matrix and the fused operations of `gemv_kernel`


@triton.jit
def slot_columns(units, BITS: tl.constexpr):
    """Columns of a vector that are multiplied with each slot, [units, 4]."""
    cols = ()
    for slot in tl.static_range(0, 32 // BITS):
        slot_cols = units[:, None] * (128 // BITS) + 4 * slot + tl.arange(0, 4)[None, :]
        cols = cols + (slot_cols,)  # noqa: RUF005 (Triton has no unpacking)
    return cols


@triton.jit
def load_norm_slots(gain, shift, units, U: tl.constexpr, BITS: tl.constexpr, NORM: tl.constexpr):
    """`load_norm` in slots, from vectors that are stored slot by slot (`in_slots`): neighbouring
    threads load neighbouring numbers."""
    gains, shifts = (), ()
    for slot in tl.static_range(0, 32 // BITS):
        at = (slot * U + units)[:, None] * 4 + tl.arange(0, 4)[None, :]
        if NORM != 0:
            gains = gains + (tl.load(gain + at, (units < U)[:, None], 0.0),)  # noqa: RUF005
        if NORM == 2:
            shifts = shifts + (tl.load(shift + at, (units < U)[:, None], 0.0),)  # noqa: RUF005
    return gains, shifts


@triton.jit
def load_slots(vector, units, K: tl.constexpr, BITS: tl.constexpr):
    """Load a vector of K numbers in float32, in slots: two at a time, 16 bytes in bfloat16."""
    slots = ()
    for slot in tl.static_range(0, 32 // BITS, 2):
        cols = units[:, None] * (128 // BITS) + 4 * slot + tl.arange(0, 8)[None, :]
        pair = tl.load(vector + cols, mask=cols < K, other=0.0)
        pair = tl.permute(tl.reshape(pair, [units.shape[0], 2, 4]), [0, 2, 1])
        first, second = tl.split(pair)
        slots = slots + (first.to(tl.float32), second.to(tl.float32))  # noqa: RUF005
    return slots


@triton.jit
def max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def pack_bytes(a, b, c, d, SECOND: tl.constexpr, NATIVE: tl.constexpr):
    """Pack the lowest (or second) bytes of four integers into one."""
    if NATIVE:
        if SECOND:
            code: tl.constexpr = """{ .reg .b32 t, u;
                prmt.b32 t, $1, $2, 0x51; prmt.b32 u, $3, $4, 0x51; prmt.b32 $0, t, u, 0x5410; }"""
        else:
            code: tl.constexpr = """{ .reg .b32 t, u;
                prmt.b32 t, $1, $2, 0x40; prmt.b32 u, $3, $4, 0x40; prmt.b32 $0, t, u, 0x5410; }"""
        packed = tl.inline_asm_elementwise(
            code, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        SHIFT: tl.constexpr = 8 if SECOND else 0
        packed = (a >> SHIFT) & 255
        packed |= ((b >> SHIFT) & 255) << 8
        packed |= ((c >> SHIFT) & 255) << 16
        packed |= (d >> SHIFT) << 24
    return packed


@triton.jit
def dot_bytes(weights, x, total, NATIVE: tl.constexpr):
    """dp4a: `total` + four products of unsigned and signed bytes."""
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
def quantize_vector(slots, BITS: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Quantize a vector to 16-bit integers.

    Returns their upper and lower bytes in the layout of a unit's words [units, 4] (two words each
    where a byte holds two weights), the step of the quantization, and the sum of the integers
    [units] (NVFP4: of each half).
    """
    SLOTS: tl.constexpr = 32 // BITS
    largest = tl.abs(slots[0])
    for slot in tl.static_range(1, SLOTS):
        largest = max_nan(largest, tl.abs(slots[slot]))
    largest = tl.reduce(largest, 1, max_nan)
    levels = 32512 / tl.maximum(largest, 1e-30)
    bits = ()
    for slot in tl.static_range(0, SLOTS):
        # The low mantissa bits of a float of this size are its integer part. With 128 added, the
        # second byte is rounded to nearest, and the lowest is the remainder plus 128.
        shifted = slots[slot] * levels[:, None] + (12582912.0 + 128.0)
        bits = bits + (shifted.to(tl.int32, bitcast=True),)  # noqa: RUF005
    upper, lower = (), ()
    EVERY: tl.constexpr = SLOTS // 4
    # e2m1: the first four slots, then the others.
    STEP: tl.constexpr = 1 if KIND >= 5 else EVERY
    STRIDE: tl.constexpr = 4 if KIND >= 5 else 1
    sums, half_sums = tl.zeros((slots[0].shape[0],), tl.int32), ()
    for group in tl.static_range(0, EVERY):
        a, b = bits[STRIDE * group], bits[STRIDE * group + STEP]
        c, d = bits[STRIDE * group + 2 * STEP], bits[STRIDE * group + 3 * STEP]
        high = pack_bytes(a, b, c, d, True, NATIVE)
        low = pack_bytes(a, b, c, d, False, NATIVE) ^ -0x7F7F7F80  # flip the top bit of each byte
        upper = upper + (high,)  # noqa: RUF005
        lower = lower + (low,)  # noqa: RUF005
        ones = tl.full(high.shape, 0x01010101, tl.int32)
        zeros = tl.zeros_like(high)
        slot_sum = dot_bytes(ones, high, zeros, NATIVE) * 256 + dot_bytes(ones, low, zeros, NATIVE)
        group_sum = tl.sum(slot_sum, 1)
        sums += group_sum
        half_sums = half_sums + (group_sum,)  # noqa: RUF005
    return upper, lower, largest / 32512, half_sums if KIND == 6 else sums


@triton.jit
def hidden_zero(numbers, NATIVE: tl.constexpr):
    """Zeros [units] that the compiler takes for results of `numbers` (it never has this NaN).

    Constants with such a zero added stay in registers instead of being copied there before each
    instruction.
    """
    if NATIVE:
        zero = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.u32 p, $1, 0x7FC12345; selp.b32 $0, 1, 0, p; }", "=r,r",
            [numbers], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        zero = tl.zeros((numbers.shape[0],), tl.int32)
    return zero


@triton.jit
def e2m1_bytes(words, zero, NATIVE: tl.constexpr):
    """The lower and upper four 4-bit floats of words as bytes: doubled values plus 12.

    A selector of prmt whose top bit is set returns the sign of the table's byte, 0 here. So one
    table has the positive values, one the negative ones, and the results are joined by or.
    `zero` [units]: see `hidden_zero`.
    """
    if NATIVE:
        zeros = zero[None, :, None]
        lower, upper = tl.inline_asm_elementwise(
            """{ .reg .b32 n, h, g, p, q;
                xor.b32 n, $2, 0x88888888; shr.u32 h, $2, 16; shr.u32 g, n, 16;
                prmt.b32 p, $3, 0x18141210, $2; prmt.b32 q, $4, 0x00040608, n; or.b32 $0, p, q;
                prmt.b32 p, $3, 0x18141210, h; prmt.b32 q, $4, 0x00040608, g; or.b32 $1, p, q; }""",
            "=r,=r,r,r,r", [words, zeros + 0x0F0E0D0C, zeros + 0x090A0B0C],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        lower, upper = tl.zeros_like(words), tl.zeros_like(words)
        for byte in tl.static_range(0, 4):
            lower |= _e2m1_integer(words >> (4 * byte)) << (8 * byte)
            upper |= _e2m1_integer(words >> (16 + 4 * byte)) << (8 * byte)
    return lower, upper


@triton.jit
def _e2m1_integer(code):
    """Doubled value of the lowest four bits, plus 12."""
    size = code & 7
    size = tl.where(size < 5, size, tl.where(size == 7, 12, 2 * size - 4))
    return tl.where((code & 8) != 0, 12 - size, 12 + size)


@triton.jit
def half_product(weights, upper, lower, NATIVE: tl.constexpr):
    """Integer dot product of the bytes of each unit, [rows, units]."""
    high = dot_bytes(weights, upper[None, :, :], tl.zeros_like(weights), NATIVE)
    return tl.sum(dot_bytes(weights, lower[None, :, :], high * 256, NATIVE), 2)


@triton.jit
def int_product(
    tile, upper, lower, step, BITS: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr
):
    """Integer dot product of each unit, [rows, units]."""
    zeros = tl.zeros_like(tile)
    if BITS == 4:
        if KIND >= 5:
            even, odd = e2m1_bytes(tile, hidden_zero(step, NATIVE), NATIVE)
        else:
            even, odd = tile & 0x0F0F0F0F, (tile >> 4) & 0x0F0F0F0F
        high = dot_bytes(odd, upper[1][None, :, :], zeros, NATIVE)
        high = dot_bytes(even, upper[0][None, :, :], high, NATIVE)
        low = dot_bytes(odd, lower[1][None, :, :], high * 256, NATIVE)
        low = dot_bytes(even, lower[0][None, :, :], low, NATIVE)
    else:
        high = dot_bytes(tile, upper[0][None, :, :], zeros, NATIVE)
        low = dot_bytes(tile, lower[0][None, :, :], high * 256, NATIVE)
    return tl.sum(low, 2)


@triton.jit
def float_product(
    tile, slots, zero, FIRST: tl.constexpr, LAST: tl.constexpr, BITS: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Float dot product of slots FIRST to LAST of each unit, [rows, units]."""
    products = slot_numbers(tile, zero, FIRST, BITS, KIND) * slots[FIRST][None, :, :]
    for slot in tl.static_range(FIRST + 1, LAST):
        products += slot_numbers(tile, zero, slot, BITS, KIND) * slots[slot][None, :, :]
    return tl.sum(products, 2)


@triton.jit
def excess_and_sums(slots, BITS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr):
    """Offset of a unit's float dot product, and the sum of the vector, [units]."""
    sums = tl.zeros((slots[0].shape[0],), tl.float32)
    excess = sums
    for slot in tl.static_range(0, 32 // BITS):
        slot_sum = tl.sum(slots[slot], 1)
        sums += slot_sum
        excess += slot_sum * (magic(slot, BITS, KIND) + OFFSET)
    return excess, sums


@triton.jit
def product(
    tile, record, factor, units, slots, upper, lower, step, sums, zero,
    BITS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, SHARE: tl.constexpr,
    INTEGER: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Rows times the vector, [rows]. `sums`: sum of the vector in each unit."""
    scale, minimum = scale_and_minimum(record, factor, units, KIND, SHARE)
    SHIFT: tl.constexpr = 12 if KIND >= 5 else OFFSET
    if KIND == 6:
        if INTEGER:
            front, back = e2m1_bytes(tile, hidden_zero(step, NATIVE), NATIVE)
            first = half_product(front, upper[0], lower[0], NATIVE) - (SHIFT * sums[0])[None, :]
            second = half_product(back, upper[1], lower[1], NATIVE) - (SHIFT * sums[1])[None, :]
            total = scale * first.to(tl.float32) + minimum * second.to(tl.float32)
            total *= step[None, :] * factor
        else:
            total = scale * float_product(tile, slots, zero, 0, 4, BITS, KIND)
            total += minimum * float_product(tile, slots, zero, 4, 8, BITS, KIND)
            total *= factor
    elif INTEGER:
        products = int_product(tile, upper, lower, step, BITS, KIND, NATIVE)
        products -= (SHIFT * sums)[None, :]
        total = scale * step[None, :] * products.to(tl.float32)
    else:
        products = float_product(tile, slots, zero, 0, 32 // BITS, BITS, KIND)
        total = scale * (products - step[None, :])
    if KIND == 1 or KIND == 2:
        if INTEGER:
            total -= minimum * (step * sums.to(tl.float32))[None, :]
        else:
            total -= minimum * sums[None, :]
    return tl.sum(total, 1)


@triton.jit
def block_rows(block, N, BN: tl.constexpr, GLU: tl.constexpr):
    """Rows of a block; with GLU each is followed by its row of up."""
    if GLU:
        number = tl.arange(0, 2 * BN)
        rows = block * BN + number // 2
        rows = tl.where(rows < N, rows + number % 2 * N, 2 * N)
    else:
        rows = block * BN + tl.arange(0, BN)
    return rows


@triton.jit
def normalize_vector(
    vector_slots, gains, shifts, cols, x, eps, K: tl.constexpr, BITS: tl.constexpr,
    NORM: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """Normalize the vector; return it in slots, and a factor for the products.

    With LATER the factor is the RMS norm's root, which is applied after the products.
    """
    root = 1.0
    if LATER:
        slots = ()
        squares = tl.zeros_like(vector_slots[0])
        for slot in tl.static_range(0, 32 // BITS):
            squares += vector_slots[slot] * vector_slots[slot]
            slots = slots + (vector_slots[slot] * gains[slot],)  # noqa: RUF005
        root = tl.rsqrt(tl.sum(squares) / K + eps)
    else:
        slots = normalize_parts(vector_slots, gains, shifts, cols, x, eps, K, NORM, 32 // BITS)
    return slots, root


@triton.jit
def packed_gemv(
    x, first, second, sums, post_gain, post_shift, gain, shift, quants, records, factors, bias,
    res, out, N, eps, added_scale, sum_scale, scale, X_STRIDE, RES_STRIDE, OUT_STRIDE,
    K: tl.constexpr, U: tl.constexpr, UP: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, SHARE: tl.constexpr, BN: tl.constexpr, ADDED: tl.constexpr,
    POST: tl.constexpr, SUM_SCALED: tl.constexpr, NORM: tl.constexpr, GLU: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RES: tl.constexpr, SCALED: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr, LIMIT: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    """`gemv_kernel` with a packed matrix of U units per row (UP: the power of two >= U).

    NATIVE: on a GPU, with instructions for bytes.
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
    units, height = tl.arange(0, UP), N * (1 + GLU)
    tile, record, factor = load_units(
        quants, records, factors, block_rows(start, N, BN, GLU), units, height, U, BITS, KIND,
        SHARE,
    )  # fmt: skip
    SLOTS: tl.constexpr = 32 // BITS
    cols = slot_columns(units, BITS)
    gains, shifts = load_norm_slots(gain, shift, units, U, BITS, NORM)
    post_gains, post_shifts = load_norm_slots(post_gain, post_shift, units, U, BITS, POST)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    vector_slots = load_slots(x, units, K, BITS)
    if ADDED > 0:
        at = vector_index * K
        vector_slots = add_to_residual(
            vector_slots, first + at, second + at, post_gains, post_shifts, cols, eps, added_scale,
            sum_scale, K, ADDED, POST, SUM_SCALED, SLOTS,
        )  # fmt: skip
        if start == 0:
            store_parts(sums + at, vector_slots, cols, K, SLOTS)
    INTEGER: tl.constexpr = KIND != 4 and x.dtype.element_ty.primitive_bitwidth == 16
    slots, root = normalize_vector(
        vector_slots, gains, shifts, cols, x, eps, K, BITS, NORM, INTEGER and NORM == 1
    )
    upper, lower = slots, slots
    if INTEGER:
        upper, lower, step, sums = quantize_vector(slots, BITS, KIND, NATIVE)
        step *= root
    else:
        step, sums = excess_and_sums(slots, BITS, KIND, OFFSET)
    zero = tl.minimum(N, 0)
    for block in range(start, tl.cdiv(N, BN), stride):
        next_tile, next_record, next_factor = tile, record, factor
        if LOOP:
            next_tile, next_record, next_factor = load_units(
                quants, records, factors, block_rows(block + stride, N, BN, GLU), units, height,
                U, BITS, KIND, SHARE,
            )  # fmt: skip
        y = product(
            tile, record, factor, units, slots, upper, lower, step, sums, zero, BITS, KIND, OFFSET,
            SHARE, INTEGER, NATIVE,
        )  # fmt: skip
        z = y
        if GLU:
            y, z = tl.split(tl.reshape(y, [BN, 2]))
        rows = block * BN + tl.arange(0, BN)
        epilogue(
            y, z, rows, rows < N, bias, res, out, scale, N, GLU, ACTIVATION, BIAS, RES, SCALED,
            LIMIT,
        )  # fmt: skip
        tile, record, factor = next_tile, next_record, next_factor
