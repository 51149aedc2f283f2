"""Decode attention over a paged KV cache.

A row is one new token: its row of the block table, its position, and the end of its visible
context. Keys and values are [slots, KV, HD], slot = page * PAGE + offset; a row of `qkv` (STRIDE
numbers) has all query heads, then (with KEYS) all key heads, then (from VALUE_AT on) all value
heads; VALUE_AT may be the key heads. Without KEYS another layer has stored keys and values.

The context is processed in tiles of TILE keys, and tiles are grouped into pieces (split-K). Their
borders depend on the sequence only, not on the batch, and pieces are combined in order. So a row's
result depends neither on other rows nor on the number of programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import wait

# -- Online softmax over tiles of keys, and the combination of pieces of a context


@triton.jit
def empty_state(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """State before the first key."""
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS, 16), tl.float32)
    return peak, total, tl.zeros((ROWS, WIDTH), tl.float32)


@triton.jit
def scores_of(query, key, scale, SOFTCAP: tl.constexpr):
    """Attention scores in base 2 (for exp2), with optional soft capping."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if SOFTCAP > 0:
        # `scale` gives 2x, for tanh(x) = 1 - 2 / (exp(2x) + 1); log2(e) is multiplied afterwards.
        capped = 1.0 - 2.0 / (tl.exp2(scores * scale) + 1.0)
        return capped * (SOFTCAP * 1.4426950408889634)
    return scores * scale


@triton.jit
def finite(peak):
    """A peak that can be subtracted: 0 where no key was visible."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def add_tile(scores, value, peak, total, mixed, TILE: tl.constexpr):
    """Add a tile: scores [rows, TILE] (-inf: masked) and values [TILE, width]."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = finite(new_peak)
    fade = tl.exp2(peak - base)[:, None]
    weights = tl.exp2(scores - base[:, None]).to(value.dtype)
    ones = tl.full((TILE, 16), 1.0, tl.float32).to(value.dtype)
    total = tl.dot(weights, ones, total * fade, input_precision="ieee")
    mixed = tl.dot(weights, value, mixed * fade, input_precision="ieee")
    return new_peak, total, mixed


@triton.jit
def combine(peak, total, mixed, piece_peak, piece_total, piece_mixed):
    """Combine a state with that of the next piece."""
    new_peak = tl.maximum(peak, piece_peak)
    base = finite(new_peak)
    fade, gain = tl.exp2(peak - base)[:, None], tl.exp2(piece_peak - base)[:, None]
    return new_peak, total * fade + piece_total * gain, mixed * fade + piece_mixed * gain


@triton.jit
def normalize(peak, total, mixed, heads, real, sinks, SINKS: tl.constexpr):
    """Output of attention. A sink adds to the sum of weights but has no value."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        _, total, mixed = combine(peak, total, mixed, sink, total * 0.0 + 1.0, mixed * 0.0)
    return mixed / tl.max(total, 1)[:, None]


@triton.jit
def piece_power(first, end, TILE: tl.constexpr, PIECES: tl.constexpr):
    """log2 of the number of tiles per piece, so that there are about PIECES pieces.

    There may be one more, since pieces begin at fixed positions. `first` to `end`: the visible
    positions of a query.
    """
    min_tiles = ((end - first + TILE - 1) // TILE + PIECES - 1) // PIECES
    # The next power of two is in the exponent of a float.
    return ((2 * min_tiles - 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _gains(q_gain, k_gain, rows, places, mask, H: tl.constexpr):
    """Norm gains at `places` of a head, for rows that are query heads or key heads."""
    query = tl.load(q_gain + places, mask=mask, other=0.0)
    key = tl.load(k_gain + places, mask=mask, other=0.0)
    return tl.where((rows < H)[:, None], query[None, :], key[None, :])


@triton.jit
def _partners(wide, ROTARY: tl.constexpr):
    """RoPE rotates each number together with its partner, half the rotary width away."""
    return tl.where(wide < ROTARY // 2, wide + ROTARY // 2, wide - ROTARY // 2)


@triton.jit
def _load_heads(line, rows, real, wide, HD: tl.constexpr, ROTARY: tl.constexpr):
    """Load heads [rows, width] of a row of qkv, and their partners of RoPE."""
    at, inside = line + rows[:, None] * HD, real[:, None]
    x = tl.load(at + wide[None, :], mask=inside & (wide < HD)[None, :], other=0.0)
    y = x
    if ROTARY > 0:
        partner, is_rotary = _partners(wide, ROTARY), (wide < ROTARY)[None, :]
        y = tl.load(at + partner[None, :], mask=inside & is_rotary, other=0.0)
    return x, y


@triton.jit
def _rotate_heads(
    x, y, q_gain, k_gain, cosine, sine, growth, position, rows, wide, eps, H: tl.constexpr,
    HD: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, GROWTH: tl.constexpr,
):  # fmt: skip
    """Apply QK norm and RoPE to heads and their partners, and with GROWTH the scale of the queries
    at this position."""
    dtype = x.dtype
    x = x.to(tl.float32)
    if NORM:
        root = tl.rsqrt(tl.sum(x * x, 1) / HD + eps)
        gains = _gains(q_gain, k_gain, rows, wide, wide < HD, H)
        x = (x * root[:, None] * gains).to(dtype).to(tl.float32)
    if ROTARY > 0:
        HALF: tl.constexpr = ROTARY // 2
        is_rotary = wide < ROTARY
        low = wide < HALF
        y = y.to(tl.float32)
        if NORM:
            partner_gains = _gains(q_gain, k_gain, rows, _partners(wide, ROTARY), is_rotary, H)
            y = (y * root[:, None] * partner_gains).to(dtype).to(tl.float32)
        angle = position.to(tl.int64) * HALF + tl.where(low, wide, wide - HALF)
        c = tl.load(cosine + angle, mask=is_rotary, other=1.0)
        s = tl.load(sine + angle, mask=is_rotary, other=0.0)
        x = x * c[None, :] + y * tl.where(low, -s, s)[None, :]
    x = x.to(dtype)
    if GROWTH:
        scale = tl.where(rows < H, tl.load(growth + position), 1.0)
        x = (x.to(tl.float32) * scale[:, None]).to(dtype)
    return x


@triton.jit
def _normalized_values(value, eps, HD: tl.constexpr):
    """RMS-normalize values [heads, width] without a gain."""
    x = value.to(tl.float32)
    return (x * tl.rsqrt(tl.sum(x * x, 1) / HD + eps)[:, None]).to(value.dtype)


@triton.jit
def store_keys(
    qkv, keys, values, table, table_rows, positions, cosine, sine, q_gain, k_gain, growth, eps,
    COLUMNS, H: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, WIDE: tl.constexpr,
    STRIDE: tl.constexpr, KEYS: tl.constexpr, VALUE_AT: tl.constexpr, VALUE_NORM: tl.constexpr,
    ROWS: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, GROWTH: tl.constexpr,
    PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """QK norm and RoPE for queries (in place) and keys; store keys and values in the pages."""
    n = tl.program_id(0)
    rows, wide = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    position = tl.load(positions + n).to(tl.int64)
    wait(PDL)
    base = qkv + n.to(tl.int64) * STRIDE
    x, y = _load_heads(base, rows, rows < H + KV * KEYS, wide, HD, ROTARY)
    x = _rotate_heads(
        x, y, q_gain, k_gain, cosine, sine, growth, position, rows, wide, eps, H, HD, ROTARY, NORM,
        GROWTH,
    )  # fmt: skip
    inside = (wide < HD)[None, :]
    is_key = ((rows >= H) & (rows < H + KV))[:, None] & inside
    at = (rows - H)[:, None] * HD + wide[None, :]
    if KEYS:
        value = tl.load(base + VALUE_AT + at, mask=is_key, other=0.0)
        if VALUE_NORM:
            value = _normalized_values(value, eps, HD)
    tl.debug_barrier()  # all threads have read before the queries are overwritten
    if ROTARY > 0 or NORM or GROWTH:
        tl.store(base + rows[:, None] * HD + wide[None, :], x, mask=(rows < H)[:, None] & inside)
    if KEYS:
        page = tl.load(table + tl.load(table_rows + n).to(tl.int64) * COLUMNS + position // PAGE)
        place = (page.to(tl.int64) * PAGE + position % PAGE) * KV * HD
        tl.store(keys + place + at, x, mask=is_key)
        tl.store(values + place + at, value, mask=is_key)


@triton.jit
def _page_offsets(
    row, offsets, in_context, h, wide, KV: tl.constexpr, HD: tl.constexpr, PAGE: tl.constexpr
):
    """Offsets of one head of the tokens at `offsets` of a sequence (a row of the block table)."""
    pages = tl.load(row + offsets // PAGE, mask=in_context, other=0)
    slots = pages.to(tl.int64) * PAGE + offsets % PAGE
    return (slots * KV + h)[:, None] * HD + wide[None, :]


@triton.jit
def _store_piece(
    parts, stats, piece, peak, total, mixed, rows, real, wide, NUM_HEADS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Store the partial result of a piece."""
    tl.store(stats + piece * 2 * NUM_HEADS + rows, peak, mask=real)
    tl.store(stats + (piece * 2 + 1) * NUM_HEADS + rows, tl.max(total, 1), mask=real)
    where = (piece * NUM_HEADS + rows)[:, None] * WIDE + wide[None, :]
    tl.store(parts + where, mixed, mask=real[:, None])


@triton.jit
def _combine_pieces(
    parts, stats, piece, pieces, rows, real, wide, HEADS_P2: tl.constexpr,
    NUM_HEADS: tl.constexpr, WIDE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Combine all pieces in order; AT_ONCE of them are loaded together, which takes as long as one.

    Other programs wrote them: read from L2 (.cg). A piece that does not exist changes nothing.
    """
    peak, total, mixed = empty_state(HEADS_P2, WIDE)
    for block in range(0, pieces, AT_ONCE):
        peaks, totals, values = (), (), ()
        for n in tl.static_range(AT_ONCE):
            p, mask = piece + block + n, real & (block + n < pieces)
            at = stats + p * 2 * NUM_HEADS + rows
            where = (p * NUM_HEADS + rows)[:, None] * WIDE + wide[None, :]
            loaded = tl.load(at, mask=mask, other=-float("inf"), cache_modifier=".cg")
            peaks = peaks + (loaded,)  # noqa: RUF005
            loaded = tl.load(at + NUM_HEADS, mask=mask, other=0.0, cache_modifier=".cg")
            totals = totals + (loaded,)  # noqa: RUF005
            loaded = tl.load(parts + where, mask=mask[:, None], other=0.0, cache_modifier=".cg")
            values = values + (loaded,)  # noqa: RUF005
        for n in tl.static_range(AT_ONCE):
            peak, total, mixed = combine(
                peak, total, mixed, peaks[n], totals[n][:, None], values[n]
            )
    return peak, total, mixed


@triton.jit
def attend(
    qkv, out, keys, values, table, table_rows, positions, ends, cosine, sine, q_gain, k_gain,
    growth, sinks, parts, stats, arrived, scale, eps, COLUMNS, MAX_PIECES, PIECES_PER_PROGRAM,
    H: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, WIDE: tl.constexpr, STRIDE: tl.constexpr,
    KEYS: tl.constexpr, VALUE_AT: tl.constexpr, VALUE_NORM: tl.constexpr, ROWS: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEADS_P2: tl.constexpr, TILE: tl.constexpr, PIECES: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, AHEAD: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, GROWTH: tl.constexpr,
    AT_ONCE: tl.constexpr, NEW: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, up to ROWS query heads of one key head, PIECES_PER_PROGRAM pieces of its context.

    NUM_HEADS of the ROWS are used; HEADS_P2 is the next power of two. AHEAD: the window counts in
    both directions.

    NEW: the token's key and value are not in the pages yet. They are computed here, stored, and
    inserted into the last tile. A program has only one tile and loads it before the PDL wait,
    unless another layer of this step has stored the key.
    """
    n, group, piece_group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = H // KV
    GROUPS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    h = group // GROUPS
    position, end = tl.load(positions + n).to(tl.int32), tl.load(ends + n).to(tl.int32)
    row = table + tl.load(table_rows + n).to(tl.int64) * COLUMNS
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position + 1 - WINDOW, 0)
    if AHEAD:
        end = tl.minimum(end, position + WINDOW)
    power = piece_power(first, end, TILE, PIECES)
    first_tile, last = first // TILE, (end - 1) // TILE
    first_piece = first_tile >> power
    pieces = (last >> power) + 1 - first_piece
    is_single = pieces <= PIECES_PER_PROGRAM  # one program processes all pieces
    if piece_group * PIECES_PER_PROGRAM >= pieces:
        return
    begin = tl.maximum((first_piece + piece_group * PIECES_PER_PROGRAM) << power, first_tile)
    stop = tl.minimum((first_piece + (piece_group + 1) * PIECES_PER_PROGRAM) << power, last + 1)
    wide, rows = tl.arange(0, WIDE), tl.arange(0, ROWS)
    first_head = h * GROUP + (group % GROUPS) * ROWS
    heads = first_head + rows
    real = (rows < NUM_HEADS) & (heads < (h + 1) * GROUP)
    inside = (wide < HD)[None, :]
    base = qkv + n.to(tl.int64) * STRIDE
    first_slot = (n * KV * GROUPS + group).to(tl.int64) * MAX_PIECES - first_piece
    peak, total, mixed = empty_state(ROWS, WIDE)  # of the current piece
    if NEW:
        if not KEYS:
            wait(PDL)
        offsets = begin * TILE + tl.arange(0, TILE)
        in_context = (offsets < position + (not KEYS)) & (offsets >= first)
        places = _page_offsets(row, offsets, in_context, h, wide, KV, HD, PAGE)
        key = tl.load(keys + places, mask=in_context[:, None] & inside, other=0.0)
        value = tl.load(values + places, mask=in_context[:, None] & inside, other=0.0)
        if KEYS:
            slot = tl.load(row + position // PAGE).to(tl.int64) * PAGE + position % PAGE
            wait(PDL)
        # Load everything before the first number is needed. Prepare the heads that exist, and
        # repeat them to the minimum of tensor cores.
        heads_p2, key_head = first_head + tl.arange(0, HEADS_P2), H + h + tl.arange(0, 1)
        query, partner = _load_heads(base, heads_p2, heads_p2 < (h + 1) * GROUP, wide, HD, ROTARY)
        if KEYS:
            new_key, key_partner = _load_heads(base, key_head, key_head >= H, wide, HD, ROTARY)
            new_value = tl.load(base + VALUE_AT + h * HD + wide, mask=wide < HD, other=0.0)[None, :]
        query = _rotate_heads(
            query, partner, q_gain, k_gain, cosine, sine, growth, position, heads_p2, wide, eps,
            H, HD, ROTARY, NORM, GROWTH,
        )  # fmt: skip
        query = tl.broadcast_to(query[None, :, :], (ROWS // HEADS_P2, HEADS_P2, WIDE))
        query = tl.reshape(query, (ROWS, WIDE))
        if KEYS and begin == last:
            stored_key = _rotate_heads(
                new_key, key_partner, q_gain, k_gain, cosine, sine, growth, position, key_head,
                wide, eps, H, HD, ROTARY, NORM, GROWTH,
            )  # fmt: skip
            stored_value = new_value
            if VALUE_NORM:
                stored_value = _normalized_values(new_value, eps, HD)
            if group % GROUPS == 0:
                place = (slot * KV + h) * HD + wide[None, :]
                tl.store(keys + place, stored_key, mask=inside)
                tl.store(values + place, stored_value, mask=inside)
            is_new = (offsets == position)[:, None]
            key = tl.where(is_new, stored_key, key)
            value = tl.where(is_new, stored_value, value)
        mask = (offsets < end) & (offsets >= first)
        scores = scores_of(query, key, scale, SOFTCAP)
        scores = tl.where(mask[None, :], scores, -float("inf"))
        peak, total, mixed = add_tile(scores, value, peak, total, mixed, TILE)
    else:
        wait(PDL)
        at = base + heads[:, None] * HD + wide[None, :]
        query = tl.load(at, mask=real[:, None] & inside, other=0.0)
        all_peak, all_total, all_mixed = empty_state(ROWS, WIDE)  # of the previous pieces
        for t in tl.range(begin, stop, num_stages=STAGES):
            offsets = t * TILE + tl.arange(0, TILE)
            in_context = (offsets < end) & (offsets >= first)
            places = _page_offsets(row, offsets, in_context, h, wide, KV, HD, PAGE)
            key = tl.load(keys + places, mask=in_context[:, None] & inside, other=0.0)
            value = tl.load(values + places, mask=in_context[:, None] & inside, other=0.0)
            scores = scores_of(query, key, scale, SOFTCAP)
            scores = tl.where(in_context[None, :], scores, -float("inf"))
            peak, total, mixed = add_tile(scores, value, peak, total, mixed, TILE)
            if ((t + 1) & ((1 << power) - 1)) == 0 and t + 1 < stop:  # end of a piece
                if is_single:
                    all_peak, all_total, all_mixed = combine(
                        all_peak, all_total, all_mixed, peak, total, mixed
                    )
                else:
                    piece = first_slot + (t >> power)
                    _store_piece(
                        parts, stats, piece, peak, total, mixed, rows, real, wide, NUM_HEADS, WIDE
                    )
                peak, total, mixed = empty_state(ROWS, WIDE)
        if is_single:
            peak, total, mixed = combine(all_peak, all_total, all_mixed, peak, total, mixed)
    out_ptr = out + n.to(tl.int64) * H * HD + wide[None, :]
    if is_single:
        result = normalize(peak, total, mixed, heads, real, sinks, SINKS).to(out.dtype.element_ty)
        tl.store(out_ptr + heads[:, None] * HD, result, mask=real[:, None] & inside)
    else:
        piece = first_slot + ((stop - 1) >> power)
        _store_piece(parts, stats, piece, peak, total, mixed, rows, real, wide, NUM_HEADS, WIDE)
        tl.debug_barrier()
        counter = arrived + n * KV * GROUPS + group
        arrived_before = tl.atomic_add(counter, 1, sem="acq_rel")
        programs = (pieces + PIECES_PER_PROGRAM - 1) // PIECES_PER_PROGRAM
        if arrived_before == programs - 1:  # the last program combines the pieces
            head_rows = tl.arange(0, HEADS_P2)
            out_heads = first_head + head_rows
            is_head = (head_rows < NUM_HEADS) & (out_heads < (h + 1) * GROUP)
            peak_p2, total_p2, mixed_p2 = _combine_pieces(
                parts, stats, first_slot + first_piece, pieces, head_rows, is_head, wide, HEADS_P2,
                NUM_HEADS, WIDE, AT_ONCE,
            )  # fmt: skip
            combined = normalize(peak_p2, total_p2, mixed_p2, out_heads, is_head, sinks, SINKS)
            combined = combined.to(out.dtype.element_ty)
            tl.store(out_ptr + out_heads[:, None] * HD, combined, mask=is_head[:, None] & inside)
            tl.store(counter, 0)


# -- Prefill attention over a paged KV cache


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
    H: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, WIDE: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, AHEAD: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    EXACT: tl.constexpr, PAGE: tl.constexpr,
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
    at = n.to(tl.int64) * STRIDE + heads * HD
    query = tl.load(qkv + at[:, None] + wide[None, :], mask=inside, other=0.0)
    end = tl.load(ends + n, mask=is_row, other=0).to(tl.int32)
    end = tl.where(is_row, end, tl.max(end, 0))  # padding rows must not shorten the loop
    first = end * 0
    if WINDOW > 0:
        position = tl.load(positions + n, mask=is_row, other=0).to(tl.int32)
        position = tl.where(is_row, position, tl.max(position, 0))
        first = tl.maximum(position + 1 - WINDOW, 0)
        if AHEAD:
            end = tl.minimum(end, position + WINDOW)
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


@triton.jit
def merge_parts(
    first, second, first_sums, second_sums, out, FIRST_ROW, FIRST_HEAD, SECOND_ROW, SECOND_HEAD,
    FIRST_SUM_ROW, FIRST_SUM_HEAD, SECOND_SUM_ROW, SECOND_SUM_HEAD, OUT_ROW,
    H: tl.constexpr, HD: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Attention of a token over two sets of keys, from that over each of them and the logarithms of
    their sums of weights."""
    n = tl.program_id(0).to(tl.int64)
    heads, wide = tl.arange(0, HEADS), tl.arange(0, WIDE)
    real, inside = heads < H, (heads < H)[:, None] & (wide < HD)[None, :]
    a = tl.load(first_sums + n * FIRST_SUM_ROW + heads * FIRST_SUM_HEAD, real, 0.0)
    b = tl.load(second_sums + n * SECOND_SUM_ROW + heads * SECOND_SUM_HEAD, real, 0.0)
    weight = (1.0 / (1.0 + tl.exp2((b - a) * 1.4426950408889634)))[:, None]
    at = n * FIRST_ROW + heads[:, None] * FIRST_HEAD + wide[None, :]
    x = tl.load(first + at, inside, 0.0).to(tl.float32)
    at = n * SECOND_ROW + heads[:, None] * SECOND_HEAD + wide[None, :]
    y = tl.load(second + at, inside, 0.0).to(tl.float32)
    at = n * OUT_ROW + heads[:, None] * HD + wide[None, :]
    result = weight * x + (1.0 - weight) * y
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
