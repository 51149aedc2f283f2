"""The second and the third walk, for rows that draw: truncation, and the token that is hit."""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.pick.line import (
    COUNTED,
    WARMED,
    WEIGHED,
    addends,
    bin_of,
    candidates,
    first_reaching,
    is_gathered,
    rank_of,
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
FEW = tl.constexpr(128)  # so many are compared each with each
SUMS = tl.constexpr(8)  # what lies before these bins
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
def before_bin(sums, bin, BINS: tl.constexpr):
    """The sum over all bins before this one."""
    return tl.sum(tl.where(tl.arange(0, BINS) < bin, sums, 0), 0)


@triton.jit
def bracket(floats, ints, state, line, bins, brackets, sums, BINS: tl.constexpr):
    """In which bins the borders and the draw fall: to a bin or two, whatever is inside. And the
    sums before these bins, in the order of `few_decide`."""
    top_k = tl.load(ints + TOP_K)
    top_p = tl.load(floats + TOP_P)
    place = tl.arange(0, BINS)
    cut = tl.full([], BINS, tl.int32)
    near = tl.full([], BINS - 1, tl.int32)  # the border lies between these two bins
    far = tl.full([], BINS - 1, tl.int32)
    low = tl.load(state + MASS)  # the mass lies between these two sums
    high = tl.load(state + MASS)
    weighed = tl.load(weighed_bins(bins, floats, BINS) + place)
    warmed = tl.load(bins + WARMED * BINS + place)
    if top_k > 0:
        counted = tl.load(bins + COUNTED * BINS + place)
        cut = tl.sum((tl.cumsum(counted, 0) < top_k).to(tl.int32), 0)
        tl.store(sums, before_bin(counted, cut, BINS))
        mass = before_bin(weighed, cut, BINS)
        tl.store(sums + 1, mass)
        low = mass.to(tl.float64)
        high = before_bin(weighed, cut + 1, BINS).to(tl.float64)
        near = tl.minimum(cut, near)
        far = tl.minimum(cut, far)
    if top_p < 1.0:
        running = tl.cumsum(weighed, 0).to(tl.float64)
        share = top_p * (1.0 - 1.0e-6)
        near = tl.minimum(tl.sum((running < share * low - 1.0).to(tl.int32), 0), near)
        far = tl.minimum(tl.sum((running < share * high + 1.0).to(tl.int32), 0), far)
        tl.store(sums + 2, before_bin(weighed, near, BINS))
    if tl.load(floats + MIN_P) > 0.0:
        bound, _ = least_reaching(floats, line[0], top_k > 0)
        limit = bin_of(bound, line[0], line[1], BINS)
        if (limit < near) & (top_p < 1.0):
            tl.store(sums + 2, before_bin(weighed, limit, BINS))
        near = tl.minimum(limit, near)
        far = tl.minimum(limit, far)
    least = before_bin(warmed, near, BINS)
    number = tl.load(state + NUMBER)
    running = tl.cumsum(warmed, 0).to(tl.float64)
    first = tl.sum((running < number * least.to(tl.float64) - 1.0).to(tl.int32), 0)
    most = before_bin(warmed, far + 1, BINS).to(tl.float64)
    tl.store(sums + 3, least)
    tl.store(sums + 4, before_bin(warmed, first, BINS))
    tl.store(sums + 5, tl.sum(warmed, 0))
    tl.store(brackets, cut)
    tl.store(brackets + 1, cut)
    tl.store(brackets + 2, near)
    tl.store(brackets + 3, far)
    tl.store(brackets + 4, first)
    tl.store(brackets + 5, tl.sum((running < number * most + 1.0).to(tl.int32), 0))


@triton.jit
def spread(
    logits, stride, floats, ints, counts, state, bins, brackets, sums, arrived, vocabulary, unit,
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
        whole = tl.load(state + WHOLE) != 0.0
        weighs = (tl.load(floats + TOP_P) < 1.0) & (tl.load(floats + TEMPERATURE) != 1.0)
        counting = tl.load(ints + TOP_K) > 0
        for piece in range(tl.program_id(1), tl.cdiv(vocabulary, PIECE), tl.num_programs(1)):
            ids = piece * PIECE + tl.arange(0, PIECE)
            x = levels(source, ids, PENALTIES)
            bin = bin_of(x, peak, scale, BINS)
            near = (ids < vocabulary) & (bin < BINS - 1)
            weight = weights(x, peak, cool, unit)
            place = bins + WARMED * BINS + bin
            tl.atomic_add(place, weight, mask=near & (weight > 0), sem="relaxed")
            if whole:
                rest = tl.sum(tl.where((ids < vocabulary) & (bin == BINS - 1), weight, 0), 0)
                tl.atomic_add(bins + WARMED * BINS + BINS - 1, rest, sem="relaxed")
            if weighs:
                weight = weights(x, peak, tl.full([], LOG2E, tl.float64), unit)
                place = bins + WEIGHED * BINS + bin
                tl.atomic_add(place, weight, mask=near & (weight > 0), sem="relaxed")
            if counting:
                place = bins + COUNTED * BINS + bin
                tl.atomic_add(place, weight * 0 + 1, mask=near, sem="relaxed")
        tl.debug_barrier()
        if tl.atomic_add(arrived + row, 1) == tl.num_programs(1) - 1:
            tl.store(arrived + row, 0)
            bracket(
                floats, ints, state, line, bins, brackets + row * BRACKETS, sums + row * SUMS, BINS
            )


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
        asked = wanted(brackets)
        for piece in range(tl.program_id(1), tl.cdiv(vocabulary, PIECE), tl.num_programs(1)):
            ids = piece * PIECE + tl.arange(0, PIECE)
            x = levels(source, ids, PENALTIES)
            bin = bin_of(x, line[0], line[1], BINS)
            # The last bin's candidates are never gathered: it does not matter where they lie.
            hit = (ids < vocabulary) & (bin < BINS - 1) & is_gathered(bin, asked)
            many = tl.sum(hit.to(tl.int32), 0)
            if many > 0:
                start = tl.atomic_add(brackets + GATHERED, many, sem="relaxed")
                place = start + tl.cumsum(hit.to(tl.int32), 0) - 1
                tl.store(values + row * ROOM + place, x, mask=hit & (place < ROOM))
                tl.store(tokens + row * ROOM + place, ids, mask=hit & (place < ROOM))


@triton.jit
def few_decide(
    source, line, floats, ints, state, sums, found, number, span, BINS: tl.constexpr,
    PENALTIES: tl.constexpr,
):  # fmt: skip
    """`fall` where few were gathered: all are seen at once, each compared with each.

    -1 where these do not decide.
    """
    top_k = tl.load(ints + TOP_K)
    top_p = tl.load(floats + TOP_P)
    count, _room, asked = number
    cut, _end, near, far, first, final = asked
    x, ids, inside = candidates(source, found, count, 0, FEW, PENALTIES)
    bin = bin_of(x, line[0], line[1], BINS)
    key = ordered(x)
    lowest = tl.full([], 0, tl.int64)
    rank = rank_of(x, ids, lowest, span)
    before = rank[None, :] >= rank[:, None]
    at_cut = inside & (bin == cut)
    at_border = inside & (bin >= near) & (bin <= far)
    at_draw = inside & (bin >= first) & (bin <= final)
    value = tl.full([], NO_BORDER, tl.int32)
    last = tl.full([], 2147483647, tl.int32)
    mass = tl.load(state + MASS).to(tl.int64)
    if top_k > 0:
        one = at_cut.to(tl.int64)
        running = tl.sum(tl.where(before, one[None, :], 0), 1) + tl.load(sums)
        hit = at_cut & (running == top_k)
        value = tl.max(tl.where(hit, key, NO_BORDER), 0)
        last = tl.where(value > NO_BORDER, tl.max(tl.where(hit, ids, 0), 0), last)
        within = at_cut & ((key > value) | ((key == value) & (ids <= last)))
        mass = tl.load(sums + 1) + tl.sum(addends(x, within, line, WEIGHED), 0)
    if top_p < 1.0:
        goal = tl.ceil(top_p * (1.0 - 1.0e-6) * mass.to(tl.float64)).to(tl.int64)
        goal = tl.maximum(goal, 1)
        weight = addends(x, at_border, line, WEIGHED)
        running = tl.sum(tl.where(before, weight[None, :], 0), 1) + tl.load(sums + 2)
        hit = (weight > 0) & (running >= goal) & (running - weight < goal)
        if tl.max(hit.to(tl.int32), 0) > 0:  # otherwise another border is nearer
            value = tl.max(tl.where(hit, key, NO_BORDER), 0)
            last = tl.max(tl.where(hit, ids, 0), 0)
    if tl.load(floats + MIN_P) > 0.0:
        _bound, least = least_reaching(floats, line[0], (top_k > 0) | (top_p < 1.0))
        last = tl.where(least > value, 2147483647, last)
        value = tl.maximum(least, value)
    total = tl.load(sums + 5)
    if value > NO_BORDER:
        within = at_border & ((key > value) | ((key == value) & (ids <= last)))
        total = tl.load(sums + 3) + tl.sum(addends(x, within, line, WARMED), 0)
    goal = (tl.load(state + NUMBER) * total.to(tl.float64)).to(tl.int64) + 1
    goal = tl.minimum(goal, total)
    weight = addends(x, at_draw, line, WARMED)
    running = tl.sum(tl.where(before, weight[None, :], 0), 1) + tl.load(sums + 4)
    hit = (weight > 0) & (running >= goal) & (running - weight < goal)
    token = tl.max(tl.where(hit, ids, -1), 0)
    known = (far < BINS - 1) | (value == NO_BORDER) & (top_p >= 1.0)
    return tl.where(known, token, -1)


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
    logits, stride, floats, ints, counts, state, bins, brackets, sums, values, tokens, picks,
    logprobs, vocabulary, unit, span, ROOM: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
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
        token = tl.full([], -1, tl.int32)
        if number[0] <= FEW:
            token = few_decide(
                source, line, floats, ints, state, sums + row * SUMS, found, number, span, BINS,
                PENALTIES,
            )  # fmt: skip
        if token < 0:
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
