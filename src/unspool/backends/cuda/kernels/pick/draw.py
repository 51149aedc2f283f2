"""Second and third pass, for sampled rows: truncation, and the sampled token."""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.pick.line import (
    COUNTS,
    TEMPERED,
    WEIGHTS,
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
    HAS_INF,
    LOG_TOTAL,
    MASS,
    MODEL_PEAK,
    PEAK_AFTER,
    PRE_TEMPERATURE,
    RANDOM,
    SCALE,
    SHARPNESS,
    STATE,
    UNTRUNCATED,
)
from unspool.backends.cuda.kernels.pick.numbers import LOG2E, depth_below, ordered
from unspool.backends.cuda.kernels.pick.penalties import (
    MIN_P,
    SETTINGS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    has_penalties,
    load_logits,
)

BIN_RANGES = tl.constexpr(8)  # three ranges of bins, and the number of gathered candidates
GATHERED = tl.constexpr(6)
MAX_FEW = tl.constexpr(128)  # up to this many are compared with each other
SUMS = tl.constexpr(8)  # sums before these bins
KINDS = tl.constexpr(3)  # of sums per bin
NO_BORDER = tl.constexpr(-2147483648)


@triton.jit
def open_row(logits, counts, floats, ints, vocabulary, state, unit, BINS: tl.constexpr):
    """Source and ranking of a row (see `load_logits` and `addends`)."""
    pre_temperature = tl.load(state + PRE_TEMPERATURE).to(tl.float32)
    has_edits = has_penalties(floats, ints)
    source = (
        logits, counts, floats, vocabulary, has_edits, tl.load(state + HAS_INF) != 0.0,
        pre_temperature,
    )  # fmt: skip
    scale = (tl.load(state + SCALE) * (BINS - 1)).to(tl.float32)
    ranking = (tl.load(state + PEAK_AFTER).to(tl.float32), scale, tl.load(state + SHARPNESS), unit)
    return source, ranking


@triton.jit
def load_bin_ranges(bin_ranges):
    """Load the three ranges of bins."""
    return (
        tl.load(bin_ranges), tl.load(bin_ranges + 1), tl.load(bin_ranges + 2),
        tl.load(bin_ranges + 3), tl.load(bin_ranges + 4), tl.load(bin_ranges + 5),
    )  # fmt: skip


@triton.jit
def weight_bins(bins, floats, BINS: tl.constexpr):
    """Sums of weights before temperature; if it is 1, these are the sums after it."""
    is_one = tl.load(floats + TEMPERATURE) == 1.0
    return bins + tl.where(is_one, TEMPERED, WEIGHTS) * BINS


@triton.jit
def min_p_bound(floats, peak, few):
    """Smallest ordered logit that min-p keeps.

    As in the chain: compared in float64 among few candidates, in float32 over the vocabulary.
    """
    wide = peak.to(tl.float64)
    bound = tl.minimum(wide + tl.log(tl.load(floats + MIN_P)) - 1.0e-6, wide)
    near = tl.maximum(bound, -3.4028234663852886e38).to(tl.float32)
    short = few & (near.to(tl.float64) < bound)
    return near, ordered(near) + short.to(tl.int32)


@triton.jit
def before_bin(sums, bin, BINS: tl.constexpr):
    """Sum over all bins before this one."""
    return tl.sum(tl.where(tl.arange(0, BINS) < bin, sums, 0), 0)


@triton.jit
def find_bins(floats, ints, state, ranking, bins, bin_ranges, sums, BINS: tl.constexpr):
    """Find the bins of the borders and of the sampled token, to within a bin or two.

    Also stores the sums before these bins, in the order of `sample_from_few`.
    """
    top_k = tl.load(ints + TOP_K)
    top_p = tl.load(floats + TOP_P)
    index = tl.arange(0, BINS)
    cut = tl.full([], BINS, tl.int32)
    near = tl.full([], BINS - 1, tl.int32)  # the border is between these two bins
    far = tl.full([], BINS - 1, tl.int32)
    low = tl.load(state + MASS)  # the mass is between these two sums
    high = tl.load(state + MASS)
    bin_weights = tl.load(weight_bins(bins, floats, BINS) + index)
    tempered = tl.load(bins + TEMPERED * BINS + index)
    if top_k > 0:
        bin_counts = tl.load(bins + COUNTS * BINS + index)
        cut = tl.sum((tl.cumsum(bin_counts, 0) < top_k).to(tl.int32), 0)
        tl.store(sums, before_bin(bin_counts, cut, BINS))
        mass = before_bin(bin_weights, cut, BINS)
        tl.store(sums + 1, mass)
        low = mass.to(tl.float64)
        high = before_bin(bin_weights, cut + 1, BINS).to(tl.float64)
        near = tl.minimum(cut, near)
        far = tl.minimum(cut, far)
    if top_p < 1.0:
        running = tl.cumsum(bin_weights, 0).to(tl.float64)
        share = top_p * (1.0 - 1.0e-6)
        near = tl.minimum(tl.sum((running < share * low - 1.0).to(tl.int32), 0), near)
        far = tl.minimum(tl.sum((running < share * high + 1.0).to(tl.int32), 0), far)
        tl.store(sums + 2, before_bin(bin_weights, near, BINS))
    if tl.load(floats + MIN_P) > 0.0:
        bound, _ = min_p_bound(floats, ranking[0], top_k > 0)
        limit = bin_of(bound, ranking[0], ranking[1], BINS)
        if (limit < near) & (top_p < 1.0):
            tl.store(sums + 2, before_bin(bin_weights, limit, BINS))
        near = tl.minimum(limit, near)
        far = tl.minimum(limit, far)
    least = before_bin(tempered, near, BINS)
    number = tl.load(state + RANDOM)
    running = tl.cumsum(tempered, 0).to(tl.float64)
    first = tl.sum((running < number * least.to(tl.float64) - 1.0).to(tl.int32), 0)
    most = before_bin(tempered, far + 1, BINS).to(tl.float64)
    tl.store(sums + 3, least)
    tl.store(sums + 4, before_bin(tempered, first, BINS))
    tl.store(sums + 5, tl.sum(tempered, 0))
    tl.store(bin_ranges, cut)
    tl.store(bin_ranges + 1, cut)
    tl.store(bin_ranges + 2, near)
    tl.store(bin_ranges + 3, far)
    tl.store(bin_ranges + 4, first)
    tl.store(bin_ranges + 5, tl.sum((running < number * most + 1.0).to(tl.int32), 0))


@triton.jit
def fill_bins(
    logits, stride, floats, ints, counts, state, bins, bin_ranges, sums, arrived, vocabulary, unit,
    PIECE: tl.constexpr, BINS: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """Sum the candidates of each bin: bins [rows, kinds, BINS]."""
    row = tl.program_id(0).to(tl.int64)
    state += row * STATE
    if tl.load(state + ACTIVE) != 0.0:
        floats += row * SETTINGS
        ints += row * SETTINGS
        bins += row * KINDS * BINS
        source, ranking = open_row(
            logits + row * stride, counts + row * vocabulary, floats, ints, vocabulary, state,
            unit, BINS,
        )  # fmt: skip
        peak, scale, sharpness, _ = ranking
        untruncated = tl.load(state + UNTRUNCATED) != 0.0
        needs_weights = (tl.load(floats + TOP_P) < 1.0) & (tl.load(floats + TEMPERATURE) != 1.0)
        needs_counts = tl.load(ints + TOP_K) > 0
        for piece in range(tl.program_id(1), tl.cdiv(vocabulary, PIECE), tl.num_programs(1)):
            ids = piece * PIECE + tl.arange(0, PIECE)
            x = load_logits(source, ids, PENALTIES)
            bin = bin_of(x, peak, scale, BINS)
            near = (ids < vocabulary) & (bin < BINS - 1)
            weight = weights(x, peak, sharpness, unit)
            index = bins + TEMPERED * BINS + bin
            tl.atomic_add(index, weight, mask=near & (weight > 0), sem="relaxed")
            if untruncated:
                tail = tl.sum(tl.where((ids < vocabulary) & (bin == BINS - 1), weight, 0), 0)
                tl.atomic_add(bins + TEMPERED * BINS + BINS - 1, tail, sem="relaxed")
            if needs_weights:
                weight = weights(x, peak, tl.full([], LOG2E, tl.float64), unit)
                index = bins + WEIGHTS * BINS + bin
                tl.atomic_add(index, weight, mask=near & (weight > 0), sem="relaxed")
            if needs_counts:
                index = bins + COUNTS * BINS + bin
                tl.atomic_add(index, weight * 0 + 1, mask=near, sem="relaxed")
        tl.debug_barrier()
        if tl.atomic_add(arrived + row, 1) == tl.num_programs(1) - 1:
            tl.store(arrived + row, 0)
            find_bins(
                floats, ints, state, ranking, bins, bin_ranges + row * BIN_RANGES,
                sums + row * SUMS, BINS,
            )  # fmt: skip


@triton.jit
def gather(
    logits, stride, floats, ints, counts, state, bins, bin_ranges, values, tokens, vocabulary, unit,
    ROOM: tl.constexpr, PIECE: tl.constexpr, BINS: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """Store the candidates of the chosen bins in `values` and `tokens` [rows, ROOM]."""
    row = tl.program_id(0).to(tl.int64)
    state += row * STATE
    if tl.load(state + ACTIVE) != 0.0:
        source, ranking = open_row(
            logits + row * stride, counts + row * vocabulary, floats + row * SETTINGS,
            ints + row * SETTINGS, vocabulary, state, unit, BINS,
        )  # fmt: skip
        bin_ranges += row * BIN_RANGES
        ranges = load_bin_ranges(bin_ranges)
        for piece in range(tl.program_id(1), tl.cdiv(vocabulary, PIECE), tl.num_programs(1)):
            ids = piece * PIECE + tl.arange(0, PIECE)
            x = load_logits(source, ids, PENALTIES)
            bin = bin_of(x, ranking[0], ranking[1], BINS)
            # The last bin is never gathered: its candidates do not matter.
            hit = (ids < vocabulary) & (bin < BINS - 1) & is_gathered(bin, ranges)
            num_hits = tl.sum(hit.to(tl.int32), 0)
            if num_hits > 0:
                start = tl.atomic_add(bin_ranges + GATHERED, num_hits, sem="relaxed")
                index = start + tl.cumsum(hit.to(tl.int32), 0) - 1
                tl.store(values + row * ROOM + index, x, mask=hit & (index < ROOM))
                tl.store(tokens + row * ROOM + index, ids, mask=hit & (index < ROOM))


@triton.jit
def sample_from_few(
    source, ranking, floats, ints, state, sums, gathered, number, span, BINS: tl.constexpr,
    PENALTIES: tl.constexpr,
):  # fmt: skip
    """`sample_row` if few were gathered: compares each with each.

    Returns -1 if these do not decide.
    """
    top_k = tl.load(ints + TOP_K)
    top_p = tl.load(floats + TOP_P)
    count, _room, ranges = number
    cut, _end, near, far, first, final = ranges
    x, ids, inside = candidates(source, gathered, count, 0, MAX_FEW, PENALTIES)
    bin = bin_of(x, ranking[0], ranking[1], BINS)
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
        is_counted = at_cut.to(tl.int64)
        running = tl.sum(tl.where(before, is_counted[None, :], 0), 1) + tl.load(sums)
        hit = at_cut & (running == top_k)
        value = tl.max(tl.where(hit, key, NO_BORDER), 0)
        last = tl.where(value > NO_BORDER, tl.max(tl.where(hit, ids, 0), 0), last)
        within = at_cut & ((key > value) | ((key == value) & (ids <= last)))
        mass = tl.load(sums + 1) + tl.sum(addends(x, within, ranking, WEIGHTS), 0)
    if top_p < 1.0:
        goal = tl.ceil(top_p * (1.0 - 1.0e-6) * mass.to(tl.float64)).to(tl.int64)
        goal = tl.maximum(goal, 1)
        weight = addends(x, at_border, ranking, WEIGHTS)
        running = tl.sum(tl.where(before, weight[None, :], 0), 1) + tl.load(sums + 2)
        hit = (weight > 0) & (running >= goal) & (running - weight < goal)
        if tl.max(hit.to(tl.int32), 0) > 0:  # otherwise another truncation cuts off more
            value = tl.max(tl.where(hit, key, NO_BORDER), 0)
            last = tl.max(tl.where(hit, ids, 0), 0)
    if tl.load(floats + MIN_P) > 0.0:
        _bound, least = min_p_bound(floats, ranking[0], (top_k > 0) | (top_p < 1.0))
        last = tl.where(least > value, 2147483647, last)
        value = tl.maximum(least, value)
    total = tl.load(sums + 5)
    if value > NO_BORDER:
        within = at_border & ((key > value) | ((key == value) & (ids <= last)))
        total = tl.load(sums + 3) + tl.sum(addends(x, within, ranking, TEMPERED), 0)
    goal = (tl.load(state + RANDOM) * total.to(tl.float64)).to(tl.int64) + 1
    goal = tl.minimum(goal, total)
    weight = addends(x, at_draw, ranking, TEMPERED)
    running = tl.sum(tl.where(before, weight[None, :], 0), 1) + tl.load(sums + 4)
    hit = (weight > 0) & (running >= goal) & (running - weight < goal)
    token = tl.max(tl.where(hit, ids, -1), 0)
    is_decided = (far < BINS - 1) | (value == NO_BORDER) & (top_p >= 1.0)
    return tl.where(is_decided, token, -1)


@triton.jit
def sample_row(
    source, ranking, floats, ints, state, bins, gathered, number, span, BINS: tl.constexpr,
    BLOCK: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """Sample a token: find the borders of top-k and top-p, then the token of the random number."""
    top_k = tl.load(ints + TOP_K)
    top_p = tl.load(floats + TOP_P)
    index = tl.arange(0, BINS)
    value = tl.full([], NO_BORDER, tl.int32)
    last = tl.full([], 2147483647, tl.int32)
    token = tl.full([], 0, tl.int32)
    least = tl.full([], NO_BORDER, tl.int32)
    min_p_bin = tl.full([], BINS, tl.int32)
    if tl.load(floats + MIN_P) > 0.0:
        bound, least = min_p_bound(floats, ranking[0], (top_k > 0) | (top_p < 1.0))
        min_p_bin = bin_of(bound, ranking[0], ranking[1], BINS)
    for kind in range(KINDS):
        applies = kind == TEMPERED
        sums = bins + kind * BINS
        goal = top_k
        if kind == COUNTS:  # fewer than k candidates: all stay
            if top_k > 0:
                applies = tl.sum(tl.load(sums + index), 0) >= top_k
        if kind == WEIGHTS:
            applies = top_p < 1.0
            sums = weight_bins(bins, floats, BINS)
        if kind == TEMPERED:
            last = tl.where(least > value, 2147483647, last)
            value = tl.maximum(least, value)
        if applies & (kind != COUNTS):
            if value > NO_BORDER:
                total = sum_until(
                    source, gathered, number, ranking, sums, value, last, kind, BINS, BLOCK,
                    PENALTIES,
                )  # fmt: skip
            elif (kind == WEIGHTS) & (top_k <= 0):
                total = tl.load(state + MASS).to(tl.int64)
            else:
                total = tl.sum(tl.load(sums + index), 0)
            goal = total
            if kind == WEIGHTS:
                share = top_p * (1.0 - 1.0e-6) * total.to(tl.float64)
                goal = tl.maximum(tl.ceil(share).to(tl.int64), 1)
                # If min-p cuts off more, the border of top-p does not matter.
                applies = tl.sum(tl.where(index <= min_p_bin, tl.load(sums + index), 0), 0) >= goal
            else:
                part = (tl.load(state + RANDOM) * total.to(tl.float64)).to(tl.int64)
                goal = tl.minimum(part + 1, total)
        if applies:
            value, last = first_reaching(
                source, gathered, number, ranking, sums, goal, span, kind, BINS, BLOCK, PENALTIES
            )
            token = last
    return token


@triton.jit
def sample_tokens(
    logits, stride, floats, ints, counts, state, bins, bin_ranges, sums, values, tokens, picks,
    logprobs, vocabulary, unit, span, ROOM: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
    PENALTIES: tl.constexpr,
):  # fmt: skip
    """Pick the token of every sampled row; reset the bins."""
    row = tl.program_id(0).to(tl.int64)
    state += row * STATE
    if tl.load(state + ACTIVE) != 0.0:
        logits += row * stride
        floats += row * SETTINGS
        ints += row * SETTINGS
        bins += row * KINDS * BINS
        bin_ranges += row * BIN_RANGES
        source, ranking = open_row(
            logits, counts + row * vocabulary, floats, ints, vocabulary, state, unit, BINS
        )
        gathered = (values + row * ROOM, tokens + row * ROOM)
        number = (tl.load(bin_ranges + GATHERED), ROOM, load_bin_ranges(bin_ranges))
        token = tl.full([], -1, tl.int32)
        if number[0] <= MAX_FEW:
            token = sample_from_few(
                source, ranking, floats, ints, state, sums + row * SUMS, gathered, number, span,
                BINS, PENALTIES,
            )  # fmt: skip
        if token < 0:
            token = sample_row(
                source, ranking, floats, ints, state, bins, gathered, number, span, BINS, BLOCK,
                PENALTIES,
            )  # fmt: skip
        logit = tl.load(logits + token).to(tl.float64)
        below = depth_below(logit, tl.load(state + MODEL_PEAK))
        tl.store(picks + row, token.to(tl.int64))
        tl.store(logprobs + row, -below - tl.load(state + LOG_TOTAL))
        tl.debug_barrier()
        tl.store(bin_ranges + GATHERED, 0)
        for kind in range(KINDS):
            tl.store(bins + kind * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int64))
