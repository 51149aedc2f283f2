"""Prefill attention over a paged KV cache.

`store_keys` has prepared queries and stored keys. A program processes ROWS rows of one chunk for
one key head: a row is a token and one of the query heads that share the key head. Tiles of keys
begin at multiples of TILE from the start of the sequence, so results do not depend on chunk
borders.

EXACT: the tiles and pieces of decode, combined in the same order (with few rows, so that the
compiler chooses the same instructions): results are bit-identical to decode.
"""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.softmax import (
    add_tile,
    combine,
    empty_state,
    normalize,
    piece_power,
    scores_of,
)


@triton.jit
def _load_tile(
    keys, values, row, t, h, wide, begin, end,
    KV: tl.constexpr, HD: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Load keys and values of a tile; zero outside of `begin` to `end` unless ALL are inside."""
    offsets = t * TILE + tl.arange(0, TILE)
    if ALL:
        slots = tl.load(row + offsets // PAGE).to(tl.int64) * PAGE + offsets % PAGE
        places = (slots * KV + h)[:, None] * HD + wide[None, :]
        return offsets, tl.load(keys + places), tl.load(values + places)
    in_context = (offsets >= begin) & (offsets < end)
    slots = (
        tl.load(row + offsets // PAGE, mask=in_context, other=0).to(tl.int64) * PAGE
        + offsets % PAGE
    )
    places = (slots * KV + h)[:, None] * HD + wide[None, :]
    inside = in_context[:, None] & (wide < HD)[None, :]
    key = tl.load(keys + places, mask=inside, other=0.0)
    return offsets, key, tl.load(values + places, mask=inside, other=0.0)


@triton.jit
def prefill(
    qkv, out, keys, values, table, tiles, positions, ends, sinks, scale, COLUMNS,
    H: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, EXACT: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """`tiles` [programs, 4]: the chunk's first token and number of tokens, the program's first row
    in the chunk, the chunk's row of the block table."""
    h = tl.program_id(0)
    task = tiles + tl.program_id(1) * 4
    chunk, count = tl.load(task), tl.load(task + 1)
    rows = tl.load(task + 2) + tl.arange(0, ROWS)
    row = table + tl.load(task + 3).to(tl.int64) * COLUMNS
    GROUP: tl.constexpr = H // KV
    wide = tl.arange(0, WIDE)
    is_row = rows // GROUP < count
    n, heads = chunk + rows // GROUP, h * GROUP + rows % GROUP
    inside = is_row[:, None] & (wide < HD)[None, :]
    at = n.to(tl.int64) * (H + 2 * KV) * HD + heads * HD
    query = tl.load(qkv + at[:, None] + wide[None, :], mask=inside, other=0.0)
    end = tl.load(ends + n, mask=is_row, other=0).to(tl.int32)
    end = tl.where(is_row, end, tl.max(end, 0))  # padding rows must not shorten the loop
    first = end * 0
    if WINDOW > 0:
        position = tl.load(positions + n, mask=is_row, other=0).to(tl.int32)
        position = tl.where(is_row, position, tl.max(position, 0))
        first = tl.maximum(position + 1 - WINDOW, 0)
    begin, last_end = tl.min(first, 0), tl.max(end, 0)
    peak, total, mixed = empty_state(ROWS, WIDE)
    start = begin // TILE
    if EXACT:
        all_peak, all_total, all_mixed = empty_state(ROWS, WIDE)  # of the previous pieces
        power = piece_power(first, end, TILE, PIECES)
    elif WINDOW == 0 and WIDE == HD:
        full_tiles = tl.min(end, 0) // TILE
        for t in tl.range(0, full_tiles, num_stages=STAGES):
            _, key, value = _load_tile(
                keys, values, row, t, h, wide, begin, last_end, KV, HD, TILE, PAGE, True
            )
            scores = scores_of(query, key, scale, SOFTCAP)
            peak, total, mixed = add_tile(scores, value, peak, total, mixed, TILE)
        start = full_tiles
    for t in tl.range(start, (last_end + TILE - 1) // TILE, num_stages=STAGES):
        offsets, key, value = _load_tile(
            keys, values, row, t, h, wide, begin, last_end, KV, HD, TILE, PAGE, False
        )
        scores = scores_of(query, key, scale, SOFTCAP)
        visible = offsets[None, :] < end[:, None]
        if WINDOW > 0:
            visible = visible & (offsets[None, :] >= first[:, None])
        scores = tl.where(visible, scores, -float("inf"))
        peak, total, mixed = add_tile(scores, value, peak, total, mixed, TILE)
        if EXACT:
            ends_here = (t + 1) & ((1 << power) - 1) == 0
            next_peak, next_total, next_mixed = combine(
                all_peak, all_total, all_mixed, peak, total, mixed
            )
            all_peak = tl.where(ends_here, next_peak, all_peak)
            all_total = tl.where(ends_here[:, None], next_total, all_total)
            all_mixed = tl.where(ends_here[:, None], next_mixed, all_mixed)
            peak = tl.where(ends_here, -float("inf"), peak)
            total = tl.where(ends_here[:, None], 0.0, total)
            mixed = tl.where(ends_here[:, None], 0.0, mixed)
    if EXACT:
        peak, total, mixed = combine(all_peak, all_total, all_mixed, peak, total, mixed)
    result = normalize(peak, total, mixed, heads, is_row, sinks, SINKS)
    out_offsets = (n.to(tl.int64) * H * HD + heads * HD)[:, None] + wide[None, :]
    tl.store(out + out_offsets, result.to(out.dtype.element_ty), mask=inside)
