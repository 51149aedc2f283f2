"""The second and the third walk, for rows that draw: truncation, and the token that is hit."""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.pick.line import (
    COUNTED,
    WARMED,
    WEIGHED,
    bin_of,
    first_reaching,
    is_gathered,
    sum_until,
    weights,
)
from unspool.backends.cuda.kernels.pick.measure import (
    ACTIVE,
    COOL,
    LOG_TOTAL,
    MASS,
    NUMBER,
    OWN_PEAK,
    SCALE,
    STATE,
    SURE,
    TOP,
    WARMTH,
    WHOLE,
)
from unspool.backends.cuda.kernels.pick.numbers import LOG2E, depth_below, ordered
from unspool.backends.cuda.kernels.pick.penalties import (
    MIN_P,
    NUMBERS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    has_penalties,
    levels,
)

BRACKETS = tl.constexpr(8)  # three ranges of bins to gather, and how many were gathered
GATHERED = tl.constexpr(6)
KINDS = tl.constexpr(3)  # of sums in bins
NO_BORDER = tl.constexpr(-2147483648)


@triton.jit
def opened(logits, counts, floats, ints, vocabulary, state, unit, BINS: tl.constexpr):
    """A row as the functions of the line want it: where its logits come from, and its line."""
    warmth = tl.load(state + WARMTH).to(tl.float32)
    edits = has_penalties(floats, ints)
    source = (logits, counts, floats, vocabulary, edits, tl.load(state + SURE) != 0.0, warmth)
    scale = (tl.load(state + SCALE) * (BINS - 1)).to(tl.float32)
    line = (tl.load(state + TOP).to(tl.float32), scale, tl.load(state + COOL), unit)
    return source, line


@triton.jit
def wanted(brackets):
    """Three ranges of bins."""
    return (
        tl.load(brackets), tl.load(brackets + 1), tl.load(brackets + 2),
        tl.load(brackets + 3), tl.load(brackets + 4), tl.load(brackets + 5),
    )  # fmt: skip


@triton.jit
def weighed_bins(bins, floats, BINS: tl.constexpr):
    """The sums before temperature; where it is 1, they are those after it."""
    same = tl.load(floats + TEMPERATURE) == 1.0
    return bins + tl.where(same, WARMED, WEIGHED) * BINS


@triton.jit
def least_reaching(floats, peak, few):
    """The least ordered logit that min-p keeps: compared in float64 among a few, but over the whole
    vocabulary in float32, as the chain does."""
    wide = peak.to(tl.float64)
    bound = tl.minimum(wide + tl.log(tl.load(floats + MIN_P)) - 1.0e-6, wide)
    near = tl.maximum(bound, -3.4028234663852886e38).to(tl.float32)
    short = few & (near.to(tl.float64) < bound)
    return near, ordered(near) + short.to(tl.int32)


@triton.jit
def bracket(floats, ints, state, line, bins, brackets, BINS: tl.constexpr):
    """In which bins the borders and the draw fall: to a bin or two, whatever is inside."""
    top_k = tl.load(ints + TOP_K)
    top_p = tl.load(floats + TOP_P)
    place = tl.arange(0, BINS)
    nothing = tl.full([], BINS, tl.int32)
    near = tl.full([], BINS - 1, tl.int32)  # the border lies between these two bins
    far = tl.full([], BINS - 1, tl.int32)
    low = tl.load(state + MASS)  # the mass lies between these two sums
    high = tl.load(state + MASS)
    weighed = tl.load(weighed_bins(bins, floats, BINS) + place)
    tl.store(brackets, nothing)
    tl.store(brackets + 1, nothing)
    if top_k > 0:
        counted = tl.cumsum(tl.load(bins + COUNTED * BINS + place), 0)
        cut = tl.sum((counted < top_k).to(tl.int32), 0)
        tl.store(brackets, cut)
        tl.store(brackets + 1, cut)
        low = tl.sum(tl.where(place < cut, weighed, 0), 0).to(tl.float64)
        high = tl.sum(tl.where(place <= cut, weighed, 0), 0).to(tl.float64)
        near = tl.minimum(cut, near)
        far = tl.minimum(cut, far)
    if top_p < 1.0:
        running = tl.cumsum(weighed, 0).to(tl.float64)
        share = top_p * (1.0 - 1.0e-6)
        near = tl.minimum(tl.sum((running < share * low - 1.0).to(tl.int32), 0), near)
        far = tl.minimum(tl.sum((running < share * high + 1.0).to(tl.int32), 0), far)
    if tl.load(floats + MIN_P) > 0.0:
        bound, _ = least_reaching(floats, line[0], top_k > 0)
        cut = bin_of(bound, line[0], line[1], BINS)
        near = tl.minimum(cut, near)
        far = tl.minimum(cut, far)
    tl.store(brackets + 2, near)
    tl.store(brackets + 3, far)
    warmed = tl.load(bins + WARMED * BINS + place)
    low = tl.sum(tl.where(place < near, warmed, 0), 0).to(tl.float64)
    high = tl.sum(tl.where(place <= far, warmed, 0), 0).to(tl.float64)
    number = tl.load(state + NUMBER)
    running = tl.cumsum(warmed, 0).to(tl.float64)
    tl.store(brackets + 4, tl.sum((running < number * low - 1.0).to(tl.int32), 0))
    tl.store(brackets + 5, tl.sum((running < number * high + 1.0).to(tl.int32), 0))


@triton.jit
def spread(
    logits, stride, floats, ints, counts, state, bins, brackets, arrived, vocabulary, unit,
    PIECE: tl.constexpr, BINS: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """Throws candidates into bins [rows, kinds, BINS]."""
    row = tl.program_id(0).to(tl.int64)
    state += row * STATE
    if tl.load(state + ACTIVE) != 0.0:
        floats += row * NUMBERS
        ints += row * NUMBERS
        bins += row * KINDS * BINS
        source, line = opened(
            logits + row * stride, counts + row * vocabulary, floats, ints, vocabulary, state,
            unit, BINS,
        )  # fmt: skip
        peak, scale, cool, _ = line
        ids = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
        x = levels(source, ids, PENALTIES)
        bin = bin_of(x, peak, scale, BINS)
        near = (ids < vocabulary) & (bin < BINS - 1)
        weight = weights(x, peak, cool, unit)
        tl.atomic_add(bins + WARMED * BINS + bin, weight, mask=near & (weight > 0), sem="relaxed")
        if tl.load(state + WHOLE) != 0.0:
            rest = tl.sum(tl.where((ids < vocabulary) & (bin == BINS - 1), weight, 0), 0)
            tl.atomic_add(bins + WARMED * BINS + BINS - 1, rest, sem="relaxed")
        if (tl.load(floats + TOP_P) < 1.0) & (tl.load(floats + TEMPERATURE) != 1.0):
            weight = weights(x, peak, tl.full([], LOG2E, tl.float64), unit)
            tl.atomic_add(
                bins + WEIGHED * BINS + bin, weight, mask=near & (weight > 0), sem="relaxed"
            )
        if tl.load(ints + TOP_K) > 0:
            tl.atomic_add(bins + COUNTED * BINS + bin, weight * 0 + 1, mask=near, sem="relaxed")
        tl.debug_barrier()
        if tl.atomic_add(arrived + row, 1) == tl.num_programs(1) - 1:
            tl.store(arrived + row, 0)
            bracket(floats, ints, state, line, bins, brackets + row * BRACKETS, BINS)


@triton.jit
def gather(
    logits, stride, floats, ints, counts, state, bins, brackets, values, tokens, vocabulary, unit,
    ROOM: tl.constexpr, PIECE: tl.constexpr, BINS: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """The candidates of the bins in brackets into `values` and `tokens` [rows, ROOM]."""
    row = tl.program_id(0).to(tl.int64)
    state += row * STATE
    if tl.load(state + ACTIVE) != 0.0:
        source, line = opened(
            logits + row * stride, counts + row * vocabulary, floats + row * NUMBERS,
            ints + row * NUMBERS, vocabulary, state, unit, BINS,
        )  # fmt: skip
        brackets += row * BRACKETS
        ids = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
        x = levels(source, ids, PENALTIES)
        bin = bin_of(x, line[0], line[1], BINS)
        # The last bin's candidates are never gathered: it does not matter where they lie.
        hit = (ids < vocabulary) & (bin < BINS - 1) & is_gathered(bin, wanted(brackets))
        many = tl.sum(hit.to(tl.int32), 0)
        if many > 0:
            start = tl.atomic_add(brackets + GATHERED, many, sem="relaxed")
            place = start + tl.cumsum(hit.to(tl.int32), 0) - 1
            tl.store(values + row * ROOM + place, x, mask=hit & (place < ROOM))
            tl.store(tokens + row * ROOM + place, ids, mask=hit & (place < ROOM))


@triton.jit
def fall(
    source, line, floats, ints, state, bins, found, number, span, BINS: tl.constexpr,
    BLOCK: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """The token that the number falls on: the borders of top-k and top-p, then the draw."""
    top_k = tl.load(ints + TOP_K)
    top_p = tl.load(floats + TOP_P)
    place = tl.arange(0, BINS)
    value = tl.full([], NO_BORDER, tl.int32)
    last = tl.full([], 2147483647, tl.int32)
    token = tl.full([], 0, tl.int32)
    least = tl.full([], NO_BORDER, tl.int32)
    reach = tl.full([], BINS, tl.int32)
    if tl.load(floats + MIN_P) > 0.0:
        bound, least = least_reaching(floats, line[0], (top_k > 0) | (top_p < 1.0))
        reach = bin_of(bound, line[0], line[1], BINS)
    for kind in range(KINDS):
        asked = kind == WARMED
        sums = bins + kind * BINS
        goal = top_k
        if kind == COUNTED:  # with fewer in reach, all that weigh anything stay
            if top_k > 0:
                asked = tl.sum(tl.load(sums + place), 0) >= top_k
        if kind == WEIGHED:
            asked = top_p < 1.0
            sums = weighed_bins(bins, floats, BINS)
        if kind == WARMED:
            last = tl.where(least > value, 2147483647, last)
            value = tl.maximum(least, value)
        if asked & (kind != COUNTED):
            if value > NO_BORDER:
                total = sum_until(
                    source, found, number, line, sums, value, last, kind, BINS, BLOCK, PENALTIES
                )
            elif (kind == WEIGHED) & (top_k <= 0):
                total = tl.load(state + MASS).to(tl.int64)
            else:
                total = tl.sum(tl.load(sums + place), 0)
            goal = total
            if kind == WEIGHED:
                share = top_p * (1.0 - 1.0e-6) * total.to(tl.float64)
                goal = tl.maximum(tl.ceil(share).to(tl.int64), 1)
                # Where min-p cuts off more, it does not matter where top-p would have.
                asked = tl.sum(tl.where(place <= reach, tl.load(sums + place), 0), 0) >= goal
            else:
                part = (tl.load(state + NUMBER) * total.to(tl.float64)).to(tl.int64)
                goal = tl.minimum(part + 1, total)
        if asked:
            value, last = first_reaching(
                source, found, number, line, sums, goal, span, kind, BINS, BLOCK, PENALTIES
            )
            token = last
    return token


@triton.jit
def finish(
    logits, stride, floats, ints, counts, state, bins, brackets, values, tokens, picks, logprobs,
    vocabulary, span, unit, ROOM: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
    PENALTIES: tl.constexpr,
):  # fmt: skip
    """The pick of every row that draws; the bins are empty again."""
    row = tl.program_id(0).to(tl.int64)
    state += row * STATE
    if tl.load(state + ACTIVE) != 0.0:
        logits += row * stride
        floats += row * NUMBERS
        ints += row * NUMBERS
        bins += row * KINDS * BINS
        brackets += row * BRACKETS
        source, line = opened(
            logits, counts + row * vocabulary, floats, ints, vocabulary, state, unit, BINS
        )
        found = (values + row * ROOM, tokens + row * ROOM)
        number = (tl.load(brackets + GATHERED), ROOM, wanted(brackets))
        token = fall(
            source, line, floats, ints, state, bins, found, number, span, BINS, BLOCK, PENALTIES
        )
        level = tl.load(logits + token).to(tl.float64)
        below = depth_below(level, tl.load(state + OWN_PEAK))
        tl.store(picks + row, token.to(tl.int64))
        tl.store(logprobs + row, -below - tl.load(state + LOG_TOTAL))
        tl.debug_barrier()
        tl.store(brackets + GATHERED, 0)
        for kind in range(KINDS):
            tl.store(bins + kind * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int64))
