"""Attention of the many new tokens of a prompt over the pages of their text.

Queries are prepared and keys stored (`store_keys`). A program takes ROWS rows of one chunk, for one
key head: a row is a token and one of the query heads that share the key head. Tiles of keys begin
at multiples of TILE from the beginning of the text, so it does not matter where a chunk began.

EXACT: the tiles and pieces of decoding, joined in its order, in its kind of products (few rows, so
that the compiler takes the same instructions): a query gets the bits that decoding would give it.
"""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.softmax import (
    add_tile,
    join,
    nothing,
    outcome,
    piece_power,
    scores_of,
)


@triton.jit
def _tile(
    keys, values, row, t, h, wide, begin, end,
    KV: tl.constexpr, HD: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Keys and values of a tile; unless ALL of it is there, what lies outside is zero."""
    offsets = t * TILE + tl.arange(0, TILE)
    if ALL:
        slots = tl.load(row + offsets // PAGE).to(tl.int64) * PAGE + offsets % PAGE
        places = (slots * KV + h)[:, None] * HD + wide[None, :]
        return offsets, tl.load(keys + places), tl.load(values + places)
    there = (offsets >= begin) & (offsets < end)
    slots = tl.load(row + offsets // PAGE, mask=there, other=0).to(tl.int64) * PAGE + offsets % PAGE
    places = (slots * KV + h)[:, None] * HD + wide[None, :]
    inside = there[:, None] & (wide < HD)[None, :]
    key = tl.load(keys + places, mask=inside, other=0.0)
    return offsets, key, tl.load(values + places, mask=inside, other=0.0)


@triton.jit
def prefill(
    qkv, out, keys, values, table, tiles, positions, ends, sinks, scale, COLUMNS,
    H: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, EXACT: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """`tiles`, for each program: its chunk's first token and how many there are, the first of its
    rows among those of the chunk, the chunk's line of the table."""
    h = tl.program_id(0)
    mine = tiles + tl.program_id(1) * 4
    chunk, count = tl.load(mine), tl.load(mine + 1)
    rows = tl.load(mine + 2) + tl.arange(0, ROWS)
    row = table + tl.load(mine + 3).to(tl.int64) * COLUMNS
    GROUP: tl.constexpr = H // KV
    wide = tl.arange(0, WIDE)
    real = rows // GROUP < count
    n, heads = chunk + rows // GROUP, h * GROUP + rows % GROUP
    inside = real[:, None] & (wide < HD)[None, :]
    at = n.to(tl.int64) * (H + 2 * KV) * HD + heads * HD
    query = tl.load(qkv + at[:, None] + wide[None, :], mask=inside, other=0.0)
    end = tl.load(ends + n, mask=real, other=0).to(tl.int32)
    end = tl.where(real, end, tl.max(end, 0))  # rows that are none see what others see
    first = end * 0
    if WINDOW > 0:
        position = tl.load(positions + n, mask=real, other=0).to(tl.int32)
        position = tl.where(real, position, tl.max(position, 0))
        first = tl.maximum(position + 1 - WINDOW, 0)
    begin, behind = tl.min(first, 0), tl.max(end, 0)
    peak, total, mixed = nothing(ROWS, WIDE)
    start = begin // TILE
    if EXACT:
        all_peak, all_total, all_mixed = nothing(ROWS, WIDE)  # of the pieces before
        power = piece_power(first, end, TILE, PIECES)
    elif WINDOW == 0 and WIDE == HD:
        seen_by_all = tl.min(end, 0) // TILE
        for t in tl.range(0, seen_by_all, num_stages=STAGES):
            _, key, value = _tile(
                keys, values, row, t, h, wide, begin, behind, KV, HD, TILE, PAGE, True
            )
            scores = scores_of(query, key, scale, SOFTCAP)
            peak, total, mixed = add_tile(scores, value, peak, total, mixed, TILE)
        start = seen_by_all
    for t in tl.range(start, (behind + TILE - 1) // TILE, num_stages=STAGES):
        offsets, key, value = _tile(
            keys, values, row, t, h, wide, begin, behind, KV, HD, TILE, PAGE, False
        )
        scores = scores_of(query, key, scale, SOFTCAP)
        seen = offsets[None, :] < end[:, None]
        if WINDOW > 0:
            seen = seen & (offsets[None, :] >= first[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        peak, total, mixed = add_tile(scores, value, peak, total, mixed, TILE)
        if EXACT:
            ends_here = (t + 1) & ((1 << power) - 1) == 0
            its_peak, its_total, its_mixed = join(
                all_peak, all_total, all_mixed, peak, total, mixed
            )
            all_peak = tl.where(ends_here, its_peak, all_peak)
            all_total = tl.where(ends_here[:, None], its_total, all_total)
            all_mixed = tl.where(ends_here[:, None], its_mixed, all_mixed)
            peak = tl.where(ends_here, -float("inf"), peak)
            total = tl.where(ends_here[:, None], 0.0, total)
            mixed = tl.where(ends_here[:, None], 0.0, mixed)
    if EXACT:
        peak, total, mixed = join(all_peak, all_total, all_mixed, peak, total, mixed)
    found = outcome(peak, total, mixed, heads, real, sinks, SINKS)
    ours = (n.to(tl.int64) * H * HD + heads * HD)[:, None] + wide[None, :]
    tl.store(out + ours, found.to(out.dtype.element_ty), mask=inside)
