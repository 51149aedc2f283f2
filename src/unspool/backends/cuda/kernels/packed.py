"""Packed (quantized) matrices, dequantized in registers.

A row is divided into units of 16 bytes, one load of a thread: 32 weights of 4 bits or 16 of 8. The
columns of a unit form slots of four neighbours; weight j of slot s is in word j of the unit's four
words, shifted left by BITS * s. So one mask extracts a slot from the four words, and it is
multiplied with four neighbouring numbers of the vector.

A quantized number q means  scale * (q - OFFSET) - minimum.  Scale and minimum come from a record of
two or four bytes that one or two units share (`KIND`, see `PackedLayout`), and from two factors per
256 columns for types with super-blocks. FP8 (KIND 4) has one scale per row or per SHARE units.
"""

import triton
import triton.language as tl

HALF, HALVES, SUPER, SIGNED, FLOAT8 = 0, 1, 2, 3, 4


@triton.jit
def load_units(
    quants, records, factors, rows, units, N, U: tl.constexpr, BITS: tl.constexpr,
    KIND: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Load units of some rows [rows, units, 4], with the words that hold their records (FP8: their
    scales) and factors [rows, units]."""
    inside = (rows < N)[:, None] & (units < U)[None, :]
    rows = rows.to(tl.int64)
    word = tl.arange(0, 4)[None, None, :]
    offsets = (rows[:, None] * U + units[None, :])[:, :, None] * 4 + word
    tile = tl.load(quants + offsets, inside[:, :, None], 0, eviction_policy="evict_first")
    GROUPS: tl.constexpr = (U + SHARE - 1) // SHARE
    if KIND == 4:
        at = rows[:, None] * GROUPS + (units // SHARE)[None, :]
        record = tl.load(factors + at, inside, 0.0)
    else:
        PER_WORD: tl.constexpr = 1 if KIND == 1 else 2  # records in a word
        WORDS: tl.constexpr = (GROUPS + PER_WORD - 1) // PER_WORD
        at = rows[:, None] * WORDS + (units // (SHARE * PER_WORD))[None, :]
        record = tl.load(records + at, inside, 0)
    factor = record
    if KIND == 2 or KIND == 3:
        FACTOR_UNITS: tl.constexpr = 2 * BITS  # units in 256 columns
        at = (
            rows[:, None] * ((U + FACTOR_UNITS - 1) // FACTOR_UNITS)
            + (units // FACTOR_UNITS)[None, :]
        )
        factor = tl.load(factors + at, inside, 0)
    return tile, record, factor


@triton.jit
def half_float(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_and_minimum(record, factor, units, KIND: tl.constexpr, SHARE: tl.constexpr):
    """Scale and minimum in float32, [rows, units] each."""
    minimum = 0.0
    if KIND == 0 or KIND == 2 or KIND == 3:  # two records in a word
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
    else:
        scale = record
    return scale, minimum


@triton.jit
def magic(SLOT: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr):
    """Constant that `slot_numbers` adds to each number of a slot."""
    return 0.0 if KIND == 4 else (16.0 if BITS == 4 and SLOT % 2 == 1 else 256.0)


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
    tile, scale, minimum, zero, SLOT: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """Dequantized weights of a slot, [rows, units, 4]."""
    q = slot_numbers(tile, zero, SLOT, BITS, KIND) - (magic(SLOT, BITS, KIND) + OFFSET)
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
        values = dequantize_slot(tile, scale, minimum, zero, slot, BITS, KIND, OFFSET)
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


@triton.jit
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
