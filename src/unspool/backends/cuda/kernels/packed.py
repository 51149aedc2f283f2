"""Packed matrices: their weights are unpacked in registers, on their way to the sum.

A row of a packed matrix is cut into units of 16 bytes, what one thread reads at once: 32 numbers of
4 bits or 16 of 8. The columns of a unit are slots of four neighbours; number j of slot s stands in
word j of the unit's four, BITS * s bits up. So one mask finds a slot's numbers in the four words,
and they are multiplied with four neighbours of the vector.

A number q means  scale * (q - OFFSET) - minimum.  Scale and minimum are made from a record of two
or four bytes that one or two units share (`KIND`, see `packing.py`), with two factors for every 256
columns where the file has such. FP8 numbers (KIND 4) have a scale only, for a row or for so many
of its units.
"""

import triton
import triton.language as tl

HALF, HALVES, SUPER, SIGNED, FLOAT8 = 0, 1, 2, 3, 4


@triton.jit
def fetched(
    quants, records, factors, rows, units, N, U: tl.constexpr, BITS: tl.constexpr,
    KIND: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Units of some rows [rows, units, 4] on their way, with the words that hold their records
    (FP8: their scales) and factors [rows, units]."""
    inside = (rows < N)[:, None] & (units < U)[None, :]
    rows = rows.to(tl.int64)
    four = tl.arange(0, 4)[None, None, :]
    places = (rows[:, None] * U + units[None, :])[:, :, None] * 4 + four
    tile = tl.load(quants + places, inside[:, :, None], 0, eviction_policy="evict_first")
    GROUPS: tl.constexpr = (U + SHARE - 1) // SHARE
    if KIND == 4:
        at = rows[:, None] * GROUPS + (units // SHARE)[None, :]
        record = tl.load(factors + at, inside, 0.0)
    else:
        EACH: tl.constexpr = 1 if KIND == 1 else 2  # records in a word
        WORDS: tl.constexpr = (GROUPS + EACH - 1) // EACH
        at = rows[:, None] * WORDS + (units // (SHARE * EACH))[None, :]
        record = tl.load(records + at, inside, 0)
    factor = record
    if KIND == 2 or KIND == 3:
        MANY: tl.constexpr = 2 * BITS  # units in 256 columns
        at = rows[:, None] * ((U + MANY - 1) // MANY) + (units // MANY)[None, :]
        factor = tl.load(factors + at, inside, 0)
    return tile, record, factor


@triton.jit
def half_float(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_and_minimum(record, factor, units, KIND: tl.constexpr, SHARE: tl.constexpr):
    """In 32 bits, [rows, units] each."""
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
        own = (record >> (8 * (units % 2))[None, :]) & 255  # two signed bytes, one for each unit
        scale = half_float(factor) * ((own ^ 128) - 128).to(tl.float32)
    else:
        scale = record
    return scale, minimum


@triton.jit
def magic(SLOT: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr):
    """What the `numbers` of a slot have too much."""
    return 0.0 if KIND == 4 else (16.0 if BITS == 4 and SLOT % 2 == 1 else 256.0)


@triton.jit
def numbers(words, zero, SLOT: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr):
    """What a slot holds [rows, units, 4], as floats: `magic` + q.

    The bits of q are moved to the upper end of a float's fraction, and become the last ones of 16
    or 256: quicker than to convert them, and near enough to the upper end for a sum in 32 bits.
    `zero` is not known as such when this is compiled: the float's upper bits then stay in
    a register, and one instruction does both the masking and the joining."""
    FIRST: tl.constexpr = BITS * (SLOT // 2 * 2) if BITS == 4 else BITS * SLOT
    if KIND == 4:
        found = (words >> FIRST).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        moved = words << (15 - FIRST) if FIRST < 15 else words >> (FIRST - 15)
        if BITS == 8:
            bits = (moved & 0x7F8000) | (0x43800000 + zero)
        elif SLOT % 2 == 0:
            bits = (moved & 0x78000) | (0x43800000 + zero)
        else:
            bits = (moved & 0x780000) | (0x41800000 + zero)
        found = bits.to(tl.float32, bitcast=True)
    return found


@triton.jit
def unpacked(
    tile, scale, minimum, zero, SLOT: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """The numbers of a slot themselves, [rows, units, 4]."""
    q = numbers(tile, zero, SLOT, BITS, KIND) - (magic(SLOT, BITS, KIND) + OFFSET)
    found = q * scale[:, :, None]
    if KIND == 1 or KIND == 2:
        found -= minimum[:, :, None]
    return found


@triton.jit
def whole_rows(
    tile, record, factor, units, zero, like, BN: tl.constexpr, BU: tl.constexpr,
    BITS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """All numbers of some units side by side [rows, columns], in the type of `like`."""
    scale, minimum = scale_and_minimum(record, factor, units, KIND, SHARE)
    slots = ()
    for slot in tl.static_range(0, 32 // BITS):
        found = unpacked(tile, scale, minimum, zero, slot, BITS, KIND, OFFSET)
        slots = slots + (found.to(like.dtype.element_ty),)  # noqa: RUF005
    # Each join adds a bit of the slot's number as the last axis, the highest first.
    if BITS == 4:
        even = tl.join(tl.join(slots[0], slots[4]), tl.join(slots[2], slots[6]))
        odd = tl.join(tl.join(slots[1], slots[5]), tl.join(slots[3], slots[7]))
        whole = tl.permute(tl.join(even, odd), [0, 1, 3, 4, 5, 2])
    else:
        joined = tl.join(tl.join(slots[0], slots[2]), tl.join(slots[1], slots[3]))
        whole = tl.permute(joined, [0, 1, 3, 4, 2])
    return tl.reshape(whole, [BN, BU * (128 // BITS)])


@triton.jit
def unpack_rows(
    quants, records, factors, tokens, previous, out, first, N,
    U: tl.constexpr, BU: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, SHARE: tl.constexpr, BN: tl.constexpr,
    CHOSEN: tl.constexpr,
):  # fmt: skip
    """Rows from `first` on (up to row N) as plain numbers, BN rows by BU units a program. With
    CHOSEN line n is the row of token n; a token -1 - n is the n-th pick of the step before."""
    lines = tl.program_id(0) * BN + tl.arange(0, BN)
    units = tl.program_id(1) * BU + tl.arange(0, BU)
    rows = first + lines
    if CHOSEN:
        rows = tl.load(tokens + lines)
        rows = tl.where(rows < 0, tl.load(previous - 1 - rows, rows < 0, 0), rows)
        rows = tl.minimum(tl.maximum(rows, 0), N - 1)  # a pick that failed: its row is dropped
    tile, record, factor = fetched(quants, records, factors, rows, units, N, U, BITS, KIND, SHARE)
    SIZE: tl.constexpr = 128 // BITS
    found = whole_rows(
        tile, record, factor, units, tl.minimum(N, 0), out, BN, BU, BITS, KIND, OFFSET, SHARE
    )
    cols = tl.program_id(1) * BU * SIZE + tl.arange(0, BU * SIZE)
    inside = (rows < N)[:, None] & (cols < U * SIZE)[None, :]
    tl.store(out + lines.to(tl.int64)[:, None] * (U * SIZE) + cols[None, :], found, inside)


@triton.jit
def packed_rows(
    x, quants, records, factors, bias, out, M, N, WIDE,
    K: tl.constexpr, U: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, SHARE: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, BU: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x [M, K] · Wᵀ on tensor cores, each number summed in the same order whatever
    M is. The numbers of W are rounded to the type of x; lines of `out` are WIDE numbers apart."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    lines = tl.program_id(1) * BM + tl.arange(0, BM)
    total = tl.zeros((BN, BM), tl.float32)
    line_places = x + lines.to(tl.int64)[None, :] * K
    within, zero = tl.arange(0, BU * (128 // BITS)), tl.minimum(N, 0)
    for at in tl.range(0, U, BU, num_stages=3):
        units = at + tl.arange(0, BU)
        tile, record, factor = fetched(
            quants, records, factors, rows, units, N, U, BITS, KIND, SHARE
        )
        cols = at * (128 // BITS) + within
        seen = (cols < K)[:, None] & (lines < M)[None, :]
        part = tl.load(line_places + cols[:, None], mask=seen, other=0.0)
        found = whole_rows(tile, record, factor, units, zero, x, BN, BU, BITS, KIND, OFFSET, SHARE)
        total = tl.dot(found, part, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + rows, rows < N, 0.0).to(tl.float32)[:, None]
    at = lines.to(tl.int64)[None, :] * WIDE + rows[:, None]
    inside = (lines < M)[None, :] & (rows < N)[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
