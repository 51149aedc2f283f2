"""Attention of single tokens over the pages of their texts.

A line is a new token: which line of the block table its text has, its position, and the end of
what it sees. Keys and values are [slots, KV, HD], a token's slot being page * PAGE + place; a line
of `qkv` has all query heads, all key heads, all value heads.

A text is looked at in tiles of TILE keys, and these in pieces: both lie where the text says, not
the batch, and are joined in order. So a line's numbers do not depend on other lines, nor on how
many programs share the work.
"""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import wait
from unspool.backends.cuda.kernels.softmax import (
    add_tile,
    join,
    nothing,
    outcome,
    piece_power,
    scores_of,
)


@triton.jit
def _gains(q_gain, k_gain, rows, places, seen, H: tl.constexpr):
    """The gains at `places` of a head, for rows that are query heads or key heads."""
    query = tl.load(q_gain + places, mask=seen, other=0.0)
    key = tl.load(k_gain + places, mask=seen, other=0.0)
    return tl.where((rows < H)[:, None], query[None, :], key[None, :])


@triton.jit
def _heads(
    line, q_gain, k_gain, cosine, sine, rows, real, wide, eps,
    H: tl.constexpr, HD: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads [rows, width] of a line of qkv, normed, and turned by the angles given."""
    held = wide < HD
    x = tl.load(
        line + rows[:, None] * HD + wide[None, :], mask=real[:, None] & held[None, :], other=0.0
    )
    dtype = x.dtype
    x = x.to(tl.float32)
    if NORM:
        root = tl.rsqrt(tl.sum(x * x, 1) / HD + eps)
        own = _gains(q_gain, k_gain, rows, wide, held, H)
        x = (x * root[:, None] * own).to(dtype).to(tl.float32)
    if ROTARY > 0:
        # Each number is turned together with its partner, half the rotary width away.
        HALF: tl.constexpr = ROTARY // 2
        turned = wide < ROTARY
        low = wide < HALF
        partner = tl.where(low, wide + HALF, wide - HALF)
        both = real[:, None] & turned[None, :]
        y = tl.load(line + rows[:, None] * HD + partner[None, :], mask=both, other=0.0)
        y = y.to(tl.float32)
        if NORM:
            theirs = _gains(q_gain, k_gain, rows, partner, turned, H)
            y = (y * root[:, None] * theirs).to(dtype).to(tl.float32)
        angle = tl.where(low, wide, wide - HALF)
        c = tl.load(cosine + angle, mask=turned, other=1.0)
        s = tl.load(sine + angle, mask=turned, other=0.0)
        x = x * c[None, :] + y * tl.where(low, -s, s)[None, :]
    return x.to(dtype)


@triton.jit
def store_keys(
    qkv, keys, values, table, lines, positions, cosine, sine, q_gain, k_gain, eps, COLUMNS,
    H: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    ROTARY: tl.constexpr, NORM: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm and turn the queries where they are; norm, turn and store the keys; store the values."""
    n = tl.program_id(0)
    rows, wide = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    position = tl.load(positions + n).to(tl.int64)
    page = tl.load(table + tl.load(lines + n).to(tl.int64) * COLUMNS + position // PAGE)
    place = (page.to(tl.int64) * PAGE + position % PAGE) * KV * HD
    wait(PDL)
    base = qkv + n.to(tl.int64) * (H + 2 * KV) * HD
    angles = position * (ROTARY // 2)
    x = _heads(
        base, q_gain, k_gain, cosine + angles, sine + angles, rows, rows < H + KV, wide, eps,
        H, HD, ROTARY, NORM,
    )  # fmt: skip
    inside = (wide < HD)[None, :]
    is_key = ((rows >= H) & (rows < H + KV))[:, None] & inside
    at = (rows - H)[:, None] * HD + wide[None, :]
    value = tl.load(base + (H + KV) * HD + at, mask=is_key, other=0.0)
    tl.debug_barrier()  # a thread's neighbours have read what it is about to overwrite
    if ROTARY > 0 or NORM:
        tl.store(base + rows[:, None] * HD + wide[None, :], x, mask=(rows < H)[:, None] & inside)
    tl.store(keys + place + at, x, mask=is_key)
    tl.store(values + place + at, value, mask=is_key)


@triton.jit
def _places(row, offsets, there, h, wide, KV: tl.constexpr, HD: tl.constexpr, PAGE: tl.constexpr):
    """Where the pages of a text (a row of the table) have one head of the tokens at `offsets`."""
    pages = tl.load(row + offsets // PAGE, mask=there, other=0)
    slots = pages.to(tl.int64) * PAGE + offsets % PAGE
    return (slots * KV + h)[:, None] * HD + wide[None, :]


@triton.jit
def _leave(parts, stats, piece, peak, total, mixed, rows, real, wide, KEPT: tl.constexpr,
           WIDE: tl.constexpr):  # fmt: skip
    """What was seen in a piece, for whoever joins them."""
    tl.store(stats + piece * 2 * KEPT + rows, peak, mask=real)
    tl.store(stats + (piece * 2 + 1) * KEPT + rows, tl.max(total, 1), mask=real)
    where = (piece * KEPT + rows)[:, None] * WIDE + wide[None, :]
    tl.store(parts + where, mixed, mask=real[:, None])


@triton.jit
def _joined(parts, stats, piece, pieces, rows, real, wide, SOME: tl.constexpr, KEPT: tl.constexpr,
            WIDE: tl.constexpr):  # fmt: skip
    """All pieces of a text, in order. Others wrote them: they are read from where all can see."""
    peak, total, mixed = nothing(SOME, WIDE)
    for p in tl.range(piece, piece + pieces, num_stages=4):
        at = stats + p * 2 * KEPT + rows
        its_peak = tl.load(at, mask=real, other=0.0, cache_modifier=".cg")
        its_total = tl.load(at + KEPT, mask=real, other=1.0, cache_modifier=".cg")
        where = (p * KEPT + rows)[:, None] * WIDE + wide[None, :]
        its_mixed = tl.load(parts + where, mask=real[:, None], other=0.0, cache_modifier=".cg")
        peak, total, mixed = join(peak, total, mixed, its_peak, its_total[:, None], its_mixed)
    return peak, total, mixed


@triton.jit
def attend(
    qkv, out, keys, values, table, lines, positions, ends, cosine, sine, q_gain, k_gain, sinks,
    parts, stats, arrived, scale, eps, COLUMNS, ROOM, EACH,
    H: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    KEPT: tl.constexpr, SOME: tl.constexpr, TILE: tl.constexpr, PIECES: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    ROTARY: tl.constexpr, NORM: tl.constexpr, NEW: tl.constexpr, PAGE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One line, up to ROWS query heads of one key head (KEPT of them real; SOME: the next power of
    two), EACH pieces of what the line sees.

    NEW: the token's key and value are not in the pages yet. They are made here, stored, and put
    where the last tile would have read them. A program has one tile only, and asks for it before
    the wait: a text of one line has little else to do.
    """
    n, group, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = H // KV
    GROUPS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    h = group // GROUPS
    position, end = tl.load(positions + n).to(tl.int32), tl.load(ends + n).to(tl.int32)
    row = table + tl.load(lines + n).to(tl.int64) * COLUMNS
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position + 1 - WINDOW, 0)
    power = piece_power(first, end, TILE, PIECES)
    first_tile, last = first // TILE, (end - 1) // TILE
    first_piece = first_tile >> power
    pieces = (last >> power) + 1 - first_piece
    whole = pieces <= EACH  # one program sees everything
    if share * EACH >= pieces:
        return
    begin = tl.maximum((first_piece + share * EACH) << power, first_tile)
    stop = tl.minimum((first_piece + (share + 1) * EACH) << power, last + 1)
    wide, rows = tl.arange(0, WIDE), tl.arange(0, ROWS)
    first_head = h * GROUP + (group % GROUPS) * ROWS
    heads = first_head + rows
    real = (rows < KEPT) & (heads < (h + 1) * GROUP)
    within = (wide < HD)[None, :]
    base = qkv + n.to(tl.int64) * (H + 2 * KV) * HD
    spot = (n * KV * GROUPS + group).to(tl.int64) * ROOM - first_piece
    peak, total, mixed = nothing(ROWS, WIDE)  # of the piece at hand
    if NEW:
        offsets = begin * TILE + tl.arange(0, TILE)
        there = (offsets < position) & (offsets >= first)
        places = _places(row, offsets, there, h, wide, KV, HD, PAGE)
        key = tl.load(keys + places, mask=there[:, None] & within, other=0.0)
        value = tl.load(values + places, mask=there[:, None] & within, other=0.0)
        wait(PDL)
        angles = position.to(tl.int64) * (ROTARY // 2)
        # As many heads as there are are prepared, and repeated to what tensor cores want.
        mine = first_head + tl.arange(0, SOME)
        query = _heads(
            base, q_gain, k_gain, cosine + angles, sine + angles, mine, mine < (h + 1) * GROUP,
            wide, eps, H, HD, ROTARY, NORM,
        )  # fmt: skip
        query = tl.broadcast_to(query[None, :, :], (ROWS // SOME, SOME, WIDE))
        query = tl.reshape(query, (ROWS, WIDE))
        if begin == last:
            own = H + h + tl.arange(0, 1)
            new_key = _heads(
                base, q_gain, k_gain, cosine + angles, sine + angles, own, own >= H, wide, eps,
                H, HD, ROTARY, NORM,
            )  # fmt: skip
            new_value = tl.load(base + (H + KV + h) * HD + wide, mask=wide < HD, other=0.0)[None, :]
            if group % GROUPS == 0:
                slot = tl.load(row + position // PAGE).to(tl.int64) * PAGE + position % PAGE
                place = (slot * KV + h) * HD + wide[None, :]
                tl.store(keys + place, new_key, mask=within)
                tl.store(values + place, new_value, mask=within)
            fresh = (offsets == position)[:, None]
            key = tl.where(fresh, new_key, key)
            value = tl.where(fresh, new_value, value)
        seen = (offsets < end) & (offsets >= first)
        scores = scores_of(query, key, scale, SOFTCAP)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        peak, total, mixed = add_tile(scores, value, peak, total, mixed, TILE)
    else:
        wait(PDL)
        at = base + heads[:, None] * HD + wide[None, :]
        query = tl.load(at, mask=real[:, None] & within, other=0.0)
        all_peak, all_total, all_mixed = nothing(ROWS, WIDE)  # of the pieces before
        for t in tl.range(begin, stop, num_stages=STAGES):
            offsets = t * TILE + tl.arange(0, TILE)
            there = (offsets < end) & (offsets >= first)
            places = _places(row, offsets, there, h, wide, KV, HD, PAGE)
            key = tl.load(keys + places, mask=there[:, None] & within, other=0.0)
            value = tl.load(values + places, mask=there[:, None] & within, other=0.0)
            scores = scores_of(query, key, scale, SOFTCAP)
            scores = tl.where(there[None, :], scores, -float("inf"))
            peak, total, mixed = add_tile(scores, value, peak, total, mixed, TILE)
            if ((t + 1) & ((1 << power) - 1)) == 0 and t + 1 < stop:  # a piece ends, not the share
                if whole:
                    all_peak, all_total, all_mixed = join(
                        all_peak, all_total, all_mixed, peak, total, mixed
                    )
                else:
                    piece = spot + (t >> power)
                    _leave(parts, stats, piece, peak, total, mixed, rows, real, wide, KEPT, WIDE)
                peak, total, mixed = nothing(ROWS, WIDE)
        if whole:
            peak, total, mixed = join(all_peak, all_total, all_mixed, peak, total, mixed)
    ours = out + n.to(tl.int64) * H * HD + wide[None, :]
    if whole:
        found = outcome(peak, total, mixed, heads, real, sinks, SINKS).to(out.dtype.element_ty)
        tl.store(ours + heads[:, None] * HD, found, mask=real[:, None] & within)
    else:
        piece = spot + ((stop - 1) >> power)
        _leave(parts, stats, piece, peak, total, mixed, rows, real, wide, KEPT, WIDE)
        tl.debug_barrier()
        counter = arrived + n * KV * GROUPS + group
        before = tl.atomic_add(counter, 1, sem="acq_rel")
        if before == (pieces + EACH - 1) // EACH - 1:  # the last to come joins the pieces
            some = tl.arange(0, SOME)
            their = first_head + some
            kept = (some < KEPT) & (their < (h + 1) * GROUP)
            some_peak, some_total, some_mixed = _joined(
                parts, stats, spot + first_piece, pieces, some, kept, wide, SOME, KEPT, WIDE
            )
            joined = outcome(some_peak, some_total, some_mixed, their, kept, sinks, SINKS)
            joined = joined.to(out.dtype.element_ty)
            tl.store(ours + their[:, None] * HD, joined, mask=kept[:, None] & within)
            tl.store(counter, 0)
