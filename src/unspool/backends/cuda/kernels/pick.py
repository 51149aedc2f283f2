"""Tokens from rows of logits, on the device: what `sampling/chain.py` does with ordinary settings.

Every truncation keeps the first so many candidates in one order (likeliest first, equals by lower
id), so a row is a line with a border, and each question about it is the same: which candidate is
the first at which a sum along the line reaches a goal? It is answered without sorting, by narrowing
the range of values in which that candidate lies.

Sums along the line are whole numbers: exp(logit - peak) in steps of 2**-SHIFT. They are the same
in whatever order they are added, so a row's pick depends on nothing but the row.
"""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.numbers import ordered, smooth_exp, uniform

WAYS = tl.constexpr(16)  # into how many parts a range is divided by one walk
COUNT = tl.constexpr(0)  # what is summed up: candidates, their weights, or these after temperature
MASS = tl.constexpr(1)
WARM = tl.constexpr(2)

TOP_K = tl.constexpr(0)
SEED = tl.constexpr(1)
SAMPLE = tl.constexpr(2)
POSITION = tl.constexpr(3)
HISTORY_START = tl.constexpr(4)
HISTORY_END = tl.constexpr(5)
NUMBERS = tl.constexpr(6)

PEAK = tl.constexpr(0)  # what is known of a piece of a row
TOTAL = tl.constexpr(1)
MOMENT = tl.constexpr(2)
FIRST = tl.constexpr(3)
PARTS = tl.constexpr(4)


@triton.jit
def penalized(x, times, repetition, frequency, presence):
    """Logits of tokens that occurred so many times; in float32, each step rounded, as the chain."""
    by = repetition.to(tl.float32)
    x = tl.where(x > 0, tl.div_rn(x, by + tl.zeros_like(x)), x * by)
    x = x - (frequency * times.to(tl.float64)).to(tl.float32)
    return x - presence.to(tl.float32)


@triton.jit
def has_penalties(floats, ints):
    """Whether a row's penalties change anything."""
    active = (tl.load(floats + 3) != 1.0) | (tl.load(floats + 4) != 0.0)
    active = active | (tl.load(floats + 5) != 0.0)
    return active & (tl.load(ints + HISTORY_END) > tl.load(ints + HISTORY_START))


@triton.jit
def tally(
    floats, ints, history, previous, tokens, counts, vocabulary, BLOCK: tl.constexpr
):  # fmt: skip
    """Counts each row's history into `counts` [rows, vocabulary]; `tokens` are what was counted."""
    row = tl.program_id(0).to(tl.int64)
    floats += row * NUMBERS
    ints += row * NUMBERS
    if has_penalties(floats, ints):
        end = tl.load(ints + HISTORY_END)
        for at in range(tl.load(ints + HISTORY_START), end, BLOCK):
            place = at + tl.arange(0, BLOCK)
            token = tl.load(history + place, mask=place < end, other=vocabulary)
            ahead = token < 0  # a token that the step before picked
            picked = tl.load(previous - 1 - token, mask=ahead, other=0)
            token = tl.where(ahead, picked, token)
            inside = (token >= 0) & (token < vocabulary)
            tl.store(tokens + place, tl.where(inside, token, -1), mask=place < end)
            tl.atomic_add(counts + row * vocabulary + token, 1, mask=inside)


@triton.jit
def clear(floats, ints, tokens, counts, vocabulary, BLOCK: tl.constexpr):
    """Makes what was counted 0 again."""
    row = tl.program_id(0).to(tl.int64)
    floats += row * NUMBERS
    ints += row * NUMBERS
    if has_penalties(floats, ints):
        end = tl.load(ints + HISTORY_END)
        for at in range(tl.load(ints + HISTORY_START), end, BLOCK):
            place = at + tl.arange(0, BLOCK)
            token = tl.load(tokens + place, mask=place < end, other=-1)
            tl.store(counts + row * vocabulary + token, 0, mask=token >= 0)


@triton.jit
def summary(x, ids):
    """Of a piece of a row: its peak, Σ exp(x - peak), Σ exp(x - peak) (x - peak), and where the
    peak first is. A NaN makes the sum NaN; at a peak of ±inf, those that equal it weigh 1 each."""
    broken = tl.max((x != x).to(tl.int32), 0)
    x = tl.where(x != x, -float("inf"), x)
    peak = tl.max(x, 0)
    below = tl.maximum(tl.where(x == peak, 0.0, x - peak), -1.0e4)
    weight = tl.where(below > -1.0e4, smooth_exp(below), 0.0)
    total = tl.sum(weight.to(tl.float64), 0)
    moment = tl.sum((weight * below).to(tl.float64), 0)
    first = tl.min(tl.where(x == peak, ids, 2147483647), 0)
    return peak, tl.where(broken > 0, float("nan"), total), moment, first


@triton.jit
def keep(parts, peak, total, moment, first):
    tl.store(parts + PEAK, peak.to(tl.float64))
    tl.store(parts + TOTAL, total)
    tl.store(parts + MOMENT, moment)
    tl.store(parts + FIRST, first.to(tl.float64))


@triton.jit
def joined(parts, pieces, ROOM: tl.constexpr):
    """A row's peak, total, moment and first peak from those of its pieces, in their order."""
    place = tl.arange(0, ROOM)
    inside = place < pieces
    peaks = tl.load(parts + place * PARTS + PEAK, mask=inside, other=-float("inf"))
    totals = tl.load(parts + place * PARTS + TOTAL, mask=inside, other=0.0)
    moments = tl.load(parts + place * PARTS + MOMENT, mask=inside, other=0.0)
    firsts = tl.load(parts + place * PARTS + FIRST, mask=inside, other=2147483647.0)
    peak = tl.max(peaks, 0)
    below = tl.where(peaks == peak, 0.0, peaks - peak)
    factor = tl.exp(below)
    below = tl.maximum(below, -1.0e4)
    total = tl.sum(totals * factor, 0)
    moment = tl.sum((moments + below * totals) * factor, 0)
    first = tl.min(tl.where(peaks == peak, firsts, 2147483647.0), 0)
    return peak, total, moment, first.to(tl.int32)


@triton.jit
def measure(
    logits, stride, floats, ints, counts, own, edited, vocabulary,
    PIECE: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """What is to be known of every piece of every row, as the model gave it and after penalties."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    pieces = tl.num_programs(1)
    ids = piece * PIECE + tl.arange(0, PIECE)
    inside = ids < vocabulary
    x = tl.load(logits + row * stride + ids, mask=inside, other=-float("inf")).to(tl.float32)
    peak, total, moment, first = summary(x, ids)
    place = (row * pieces + piece) * PARTS
    keep(own + place, peak, total, moment, first)
    if PENALTIES:
        floats += row * NUMBERS
        if has_penalties(floats, ints + row * NUMBERS):
            times = tl.load(counts + row * vocabulary + ids, mask=inside, other=0)
            changed = penalized(
                x, times, tl.load(floats + 3), tl.load(floats + 4), tl.load(floats + 5)
            )
            peak, total, moment, first = summary(tl.where(times > 0, changed, x), ids)
        keep(edited + place, peak, total, moment, first)


@triton.jit
def levels(logits, counts, ids, vocabulary, floats, edits, sure, warmth, PENALTIES: tl.constexpr):
    """The logits of some tokens as the stages after the penalties see them, in float32.

    `floats` are the row's, `edits`: it has penalties. `sure`: the row has logits of +inf, which alone
    remain, as equals. `warmth`: what all are divided by (1: not).
    """
    inside = ids < vocabulary
    x = tl.load(logits + ids, mask=inside, other=-float("inf")).to(tl.float32)
    if sure:
        x = tl.where(x == float("inf"), 0.0, -float("inf"))
    if PENALTIES:
        if edits:
            times = tl.load(counts + ids, mask=inside, other=0)
            changed = penalized(
                x, times, tl.load(floats + 3), tl.load(floats + 4), tl.load(floats + 5)
            )
            x = tl.where(times > 0, changed, x)
    if warmth != 1.0:
        x = tl.div_rn(x, warmth + tl.zeros_like(x))
    return x


@triton.jit
def weights(x, inside, peak, temperature, unit, WHAT: tl.constexpr):
    """What each candidate adds to a sum along the line."""
    if WHAT == COUNT:
        return inside.to(tl.int64)
    below = tl.where(x == peak, 0.0, x - peak)
    below = below.to(tl.float64)
    if WHAT == WARM:
        below = below / temperature
    below = tl.maximum(below, -700.0)
    return tl.where(inside, tl.exp(below) * unit, 0.0).to(tl.int64)


@triton.jit
def in_line(x, ids, vocabulary, border, last):
    """Whether candidates are on this side of the border: above it in value, or up to `last` at it."""
    key = ordered(x)
    return key, (ids < vocabulary) & ((key > border) | ((key == border) & (ids <= last)))


@triton.jit
def whole_sum(
    logits, counts, vocabulary, floats, edits, sure, warmth, peak, temperature, unit, border, last,
    WHAT: tl.constexpr, BLOCK: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """The sum over the whole line."""
    sums = tl.zeros([BLOCK], tl.int64)
    for at in range(0, vocabulary, BLOCK):
        ids = at + tl.arange(0, BLOCK)
        x = levels(logits, counts, ids, vocabulary, floats, edits, sure, warmth, PENALTIES)
        _, inside = in_line(x, ids, vocabulary, border, last)
        sums += weights(x, inside, peak, temperature, unit, WHAT)
    return tl.sum(sums, 0)


@triton.jit
def reaching(
    logits, counts, vocabulary, floats, edits, sure, warmth, peak, temperature, unit, border, last, goal,
    WHAT: tl.constexpr, BLOCK: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """The first candidate, as (ordered value, id), at which the sum along the line is the goal."""
    low = tl.maximum(border, ordered(tl.full([], -3.4e38, tl.float32))).to(tl.int64)
    high = ordered(peak).to(tl.int64) + 1
    above = tl.zeros([], tl.int64)  # the sum over all that are at `high` or beyond
    parts = tl.arange(0, WAYS)
    while high - low > 1:
        step = (high - low + WAYS - 1) // WAYS
        bounds = low + parts * step
        sums = tl.zeros([BLOCK, WAYS], tl.int64)
        for at in range(0, vocabulary, BLOCK):
            ids = at + tl.arange(0, BLOCK)
            x = levels(logits, counts, ids, vocabulary, floats, edits, sure, warmth, PENALTIES)
            key, inside = in_line(x, ids, vocabulary, border, last)
            weight = weights(x, inside, peak, temperature, unit, WHAT)
            reached = key.to(tl.int64)[:, None] >= bounds[None, :]
            sums += tl.where(reached, weight[:, None], 0)
        beyond = tl.sum(sums, 0)
        part = tl.maximum(tl.sum((beyond >= goal).to(tl.int64), 0) - 1, 0)
        above = tl.where(part == WAYS - 1, above, tl.sum(tl.where(parts == part + 1, beyond, 0), 0))
        high = tl.minimum(low + (part + 1) * step, high)
        low = low + part * step
    # All that are left are equals: the goal is reached at the `rank`-th of them.
    value = low.to(tl.int32)
    passed = tl.zeros([], tl.int64)
    found = tl.zeros([], tl.int32)
    for at in range(0, vocabulary, BLOCK):
        ids = at + tl.arange(0, BLOCK)
        x = levels(logits, counts, ids, vocabulary, floats, edits, sure, warmth, PENALTIES)
        key, inside = in_line(x, ids, vocabulary, border, last)
        weight = weights(x, inside & (key == value), peak, temperature, unit, WHAT)
        running = tl.cumsum(weight, 0) + passed + above
        hit = (weight > 0) & (running >= goal) & (running - weight < goal)
        found = tl.maximum(found, tl.max(tl.where(hit, ids, 0), 0))
        passed += tl.sum(weight, 0)
    return value, found


@triton.jit
def floor_of(bound, whole):
    """The least ordered value that reaches a bound: in float32 over the whole vocabulary, in
    float64 among a few, as the chain compares them."""
    near = tl.maximum(bound, -3.4028234663852886e38).to(tl.float32)
    short = (near.to(tl.float64) < bound) & (whole == 0)
    return ordered(near) + short.to(tl.int32)


@triton.jit
def drawn(
    logits, counts, vocabulary, floats, ints, edits, sure, peak, total, unit,
    BLOCK: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """The token that a row's number falls on."""
    temperature = tl.maximum(tl.load(floats), 1.0e-6)
    top_p = tl.load(floats + 1)
    min_p = tl.load(floats + 2)
    top_k = tl.load(ints + TOP_K)
    border = tl.full([], -2147483648, tl.int32)
    last = tl.full([], 2147483647, tl.int32)
    whole = tl.full([], 1, tl.int32)
    warmth = tl.full([], 1.0, tl.float32)
    mass = total * unit
    if top_k > 0:
        if top_k < vocabulary:
            border, last = reaching(
                logits, counts, vocabulary, floats, edits, sure, warmth, peak, temperature, unit, border,
                last, top_k, COUNT, BLOCK, PENALTIES,
            )  # fmt: skip
        whole = tl.full([], 0, tl.int32)
    if top_p < 1.0:
        if whole == 0:
            mass = whole_sum(
                logits, counts, vocabulary, floats, edits, sure, warmth, peak, temperature, unit, border,
                last, MASS, BLOCK, PENALTIES,
            ).to(tl.float64)  # fmt: skip
        goal = tl.maximum(tl.ceil(top_p * (1 - 1.0e-6) * mass).to(tl.int64), 1)
        border, last = reaching(
            logits, counts, vocabulary, floats, edits, sure, warmth, peak, temperature, unit, border,
            last, goal, MASS, BLOCK, PENALTIES,
        )  # fmt: skip
        whole = tl.full([], 0, tl.int32)
    if min_p > 0.0:
        bound = tl.minimum(peak.to(tl.float64) + tl.log(min_p) - 1.0e-6, peak.to(tl.float64))
        least = floor_of(bound, whole)
        if least > border:
            border = least
            last = tl.full([], 2147483647, tl.int32)
        whole = tl.full([], 0, tl.int32)
    if whole != 0:  # then the chain divides in float32, and orders what comes out
        warmth = tl.maximum(tl.load(floats).to(tl.float32), 1.0e-6)
        if warmth != 1.0:
            peak = tl.div_rn(peak, warmth)
        temperature = tl.full([], 1.0, tl.float64)
    mass = whole_sum(
        logits, counts, vocabulary, floats, edits, sure, warmth, peak, temperature, unit, border, last,
        WARM, BLOCK, PENALTIES,
    )  # fmt: skip
    number = uniform(tl.load(ints + SEED), tl.load(ints + SAMPLE), tl.load(ints + POSITION))
    goal = tl.minimum((number * mass.to(tl.float64)).to(tl.int64) + 1, mass)
    _, token = reaching(
        logits, counts, vocabulary, floats, edits, sure, warmth, peak, temperature, unit, border, last, goal,
        WARM, BLOCK, PENALTIES,
    )  # fmt: skip
    return token


@triton.jit
def finish(
    logits, stride, floats, ints, counts, own, edited, picks, logprobs, about, vocabulary, pieces,
    unit, BLOCK: tl.constexpr, ROOM: tl.constexpr, PENALTIES: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """The pick of every row, its log-probability, and what the model's own distribution was."""
    number = tl.program_id(0).to(tl.int64)
    logits += number * stride
    counts += number * vocabulary
    floats += number * NUMBERS
    ints += number * NUMBERS
    own_peak, own_total, own_moment, token = joined(own + number * pieces * PARTS, pieces, ROOM)
    peak, total = own_peak, own_total
    sure = own_peak == float("inf")
    edits = has_penalties(floats, ints)
    one = tl.full([], 1.0, tl.float32)
    if PENALTIES:
        peak, total, moment, token = joined(edited + number * pieces * PARTS, pieces, ROOM)
        if sure & edits:  # what remains could not be known before
            peak = tl.full([], -float("inf"), tl.float64)
            for at in range(0, vocabulary, BLOCK):
                ids = at + tl.arange(0, BLOCK)
                x = levels(logits, counts, ids, vocabulary, floats, edits, sure, one, PENALTIES)
                best, part, moment, first = summary(x, ids)
                token = tl.where(best.to(tl.float64) > peak, first, token)
                peak = tl.maximum(peak, best.to(tl.float64))
            total = tl.zeros([], tl.float64)
            for at in range(0, vocabulary, BLOCK):
                ids = at + tl.arange(0, BLOCK)
                x = levels(logits, counts, ids, vocabulary, floats, edits, sure, one, PENALTIES)
                best, part, moment, first = summary(x, ids)
                total += part * tl.exp(tl.where(best == peak, 0.0, best.to(tl.float64) - peak))
    good = (own_peak > -float("inf")) & (own_total == own_total)
    good = good & (peak > -float("inf")) & (total == total)
    if SAMPLED:
        if good & (tl.load(floats) != 0.0):
            token = drawn(
                logits, counts, vocabulary, floats, ints, edits, sure & edits,
                peak.to(tl.float32), total, unit, BLOCK, PENALTIES,
            )  # fmt: skip
    level = tl.load(logits + token, mask=good, other=0.0).to(tl.float64)
    below = tl.where(level == own_peak, 0.0, level - own_peak)
    log_total = tl.log(own_total)
    tl.store(picks + number, tl.where(good, token, -1).to(tl.int64))
    tl.store(logprobs + number, tl.where(good, below - log_total, 0.0))
    about += number * 3
    tl.store(about, own_peak)
    tl.store(about + 1, own_peak + log_total)
    tl.store(about + 2, tl.maximum(log_total - own_moment / own_total, 0.0))
