"""Sampling on the device: what `sampling/chain.py` does with ordinary settings.

Every truncation keeps the first candidates of one ranking (highest logit first, ties by lower id).
So each question about a row is the same: at which candidate does a sum along the ranking reach a
goal? It is answered without sorting, by few passes over the row, each shared by many programs:

1. `summarize`: maximum and sum; greedy rows are done here.
2. `fill_bins`: candidates near enough to the maximum to matter are counted in bins by their depth
   below it, and the few bins with the borders of truncation and with the sampled token are found.
3. `gather`: the candidates of these bins. They are few, and `sample_tokens` finds the borders and
   the token among them; if there are too many, in the row itself.

Sums along the ranking are integers in units of 2**-SHIFT: they are the same in any order of
addition, so the token depends on nothing but the row. The last program of a row to end a pass does
the work after it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import wait

# -- Orderable floats, exponentials, and the random number of a draw

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_LOW = tl.constexpr(1.925963033500862e-08)  # LOG2E - float32(LOG2E)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def ordered(x):
    """Map floats to int32 in the same order; 0 and -0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """Inverse of `ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def power(x, base, base_low):
    """2 ** (x · (base + base_low)) in float32, within an ulp or two for very negative x too."""
    rounded = x * base
    error = tl.fma(x, tl.zeros_like(x) + base, -rounded) + x * base_low
    result = tl.exp2(rounded)
    return result + result * (error * LN2)


@triton.jit
def depth_below(x, peak):
    """peak - x; 0 if they are equal, even if infinite."""
    return tl.where(x == peak, 0.0, peak - x)


@triton.jit
def uniform(seed, sample, position):
    """The random number in [0,1) of `sampling/draw.py`: Philox4x32-10 of seed, sample, position.

    The upper half of `position` is the stream.
    """
    word = tl.full([], 0xFFFFFFFF, tl.uint64)
    first = tl.full([], 0xD2511F53, tl.uint64)
    second = tl.full([], 0xCD9E8D57, tl.uint64)
    c0 = position.to(tl.uint64) & word
    c1 = sample.to(tl.uint64) & word
    c2 = sample.to(tl.uint64) >> 32
    c3 = position.to(tl.uint64) >> 32
    k0 = seed.to(tl.uint64) & word
    k1 = seed.to(tl.uint64) >> 32
    for _ in range(10):
        p0 = c0 * first
        p1 = c2 * second
        c0 = (p1 >> 32) ^ c1 ^ k0
        c1 = p1 & word
        c2 = (p0 >> 32) ^ c3 ^ k1
        c3 = p0 & word
        k0 = (k0 + tl.full([], 0x9E3779B9, tl.uint64)) & word
        k1 = (k1 + tl.full([], 0xBB67AE85, tl.uint64)) & word
    bits = ((c0 << 32) | c1) >> 11
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


# -- Penalties: token counts of the history, and logits of a row after penalties


# Columns of a row's settings, as in `sampling/picker.py`.
TEMPERATURE = tl.constexpr(0)
TOP_P = tl.constexpr(1)
MIN_P = tl.constexpr(2)
REPETITION = tl.constexpr(3)
FREQUENCY = tl.constexpr(4)
PRESENCE = tl.constexpr(5)
TOP_K = tl.constexpr(0)
SEED = tl.constexpr(1)
SAMPLE = tl.constexpr(2)
POSITION = tl.constexpr(3)
HISTORY_START = tl.constexpr(4)
HISTORY_END = tl.constexpr(5)
SETTINGS = tl.constexpr(6)


@triton.jit
def has_penalties(floats, ints):
    """Whether a row's penalties change anything."""
    active = (tl.load(floats + REPETITION) != 1.0) | (tl.load(floats + FREQUENCY) != 0.0)
    active = active | (tl.load(floats + PRESENCE) != 0.0)
    return active & (tl.load(ints + HISTORY_END) > tl.load(ints + HISTORY_START))


@triton.jit
def resolve(floats, ints, history, previous, tokens, BLOCK: tl.constexpr):
    """Resolve each row's history: entry -1-n stands for `previous[n]`."""
    row = tl.program_id(0).to(tl.int64)
    floats += row * SETTINGS
    ints += row * SETTINGS
    if has_penalties(floats, ints):
        end = tl.load(ints + HISTORY_END)
        for at in range(tl.load(ints + HISTORY_START), end, BLOCK):
            index = at + tl.arange(0, BLOCK)
            token = tl.load(history + index, mask=index < end, other=0)
            picked = tl.load(previous - 1 - token, mask=token < 0, other=0)
            tl.store(tokens + index, tl.where(token < 0, picked, token), mask=index < end)


@triton.jit
def count_tokens(
    floats, ints, tokens, counts, vocabulary, CLEAR: tl.constexpr, BLOCK: tl.constexpr
):
    """Count each row's history tokens in `counts` [rows, vocabulary], or reset these counts."""
    row = tl.program_id(0).to(tl.int64)
    floats += row * SETTINGS
    ints += row * SETTINGS
    counts += row * vocabulary
    if has_penalties(floats, ints):
        end = tl.load(ints + HISTORY_END)
        for at in range(tl.load(ints + HISTORY_START), end, BLOCK):
            index = at + tl.arange(0, BLOCK)
            token = tl.load(tokens + index, mask=index < end, other=-1)
            is_valid = (token >= 0) & (token < vocabulary)
            if CLEAR:
                tl.store(counts + token, 0, mask=is_valid)
            else:
                tl.atomic_add(counts + token, 1, mask=is_valid, sem="relaxed")


@triton.jit
def penalized(x, times, floats):
    """Logits after penalties of tokens that occurred `times` times; float32, as in the chain."""
    repetition = tl.load(floats + REPETITION).to(tl.float32)
    frequency = (tl.load(floats + FREQUENCY) * times.to(tl.float64)).to(tl.float32)
    penalized_x = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    penalized_x = penalized_x - frequency - tl.load(floats + PRESENCE).to(tl.float32)
    return tl.where(times > 0, penalized_x, x)


@triton.jit
def load_logits(source, ids, PENALTIES: tl.constexpr):
    """Logits of some tokens after penalties, in float32.

    `source` is a row: pointers to its logits, counts and floats, the vocabulary size, whether it
    has penalties, whether it `has_inf` (+inf logits: only these remain, all equal), and the
    `temperature` to divide by (1: none).
    """
    logits, counts, floats, vocabulary, has_edits, has_inf, temperature = source
    inside = ids < vocabulary
    x = tl.load(logits + ids, mask=inside, other=-float("inf")).to(tl.float32)
    if PENALTIES:
        if has_edits:
            if has_inf:
                x = tl.where(x == float("inf"), 0.0, -float("inf"))
            x = penalized(x, tl.load(counts + ids, mask=inside, other=0), floats)
    if temperature != 1.0:
        x = tl.div_rn(x, temperature + tl.zeros_like(x))
    return x


# -- The ranking of a row's candidates (highest logit first, ties by lower id): sums along it

COUNTS = tl.constexpr(0)
WEIGHTS = tl.constexpr(1)
TEMPERED = tl.constexpr(2)

WAYS = tl.constexpr(16)  # parts of a range per pass over the candidates


@triton.jit
def bin_of(x, peak, scale, BINS: tl.constexpr):
    return tl.minimum(depth_below(x, peak) * scale, BINS - 1.0).to(tl.int32)


@triton.jit
def weights(x, peak, sharpness, unit):
    """exp((logit - peak) / temperature) in integer units; `sharpness` is log2(e) / temperature."""
    base = sharpness.to(tl.float32)
    base_low = (sharpness - base.to(tl.float64)).to(tl.float32)
    weight = power(-tl.minimum(depth_below(x, peak), 200.0 / base), base, base_low)
    return (weight * unit).to(tl.int64)


@triton.jit
def addends(x, inside, ranking, kind):
    """Summand of each candidate."""
    peak, _, sharpness, unit = ranking
    sharpness = tl.where(kind == WEIGHTS, LOG2E, sharpness)
    weight = tl.where(kind == COUNTS, 1, weights(x, peak, sharpness, unit))
    return tl.where(inside, weight, 0)


@triton.jit
def candidates(source, gathered, number, at, BLOCK: tl.constexpr, PENALTIES: tl.constexpr):
    """Load a block of the gathered candidates (`number` of them), or of the row if that is -1.

    Returns their logits, ids, and which of them are valid.
    """
    index = at + tl.arange(0, BLOCK)
    ids = index
    inside = index < source[3]
    if number >= 0:
        inside = index < number
        x = tl.load(gathered[0] + index, mask=inside, other=-float("inf"))
        ids = tl.load(gathered[1] + index, mask=inside, other=0)
    else:
        x = load_logits(source, ids, PENALTIES)
    return x, ids, inside


@triton.jit
def rank_of(x, ids, lowest, span):
    """Unique integers in the order of the ranking, larger ones first."""
    return (ordered(x).to(tl.int64) - lowest) * span + (span - 1 - ids)


@triton.jit
def search_bin(
    source, gathered, number, ranking, bin, above, goal, span, kind, BINS: tl.constexpr,
    BLOCK: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """`first_reaching` within a bin, by narrowing the range of ranks."""
    peak, scale, _, _ = ranking
    size = tl.where(number >= 0, number, source[3])
    lowest = tl.full([], 2147483647, tl.int32)
    highest = tl.full([], -2147483648, tl.int32)
    for at in range(0, size, BLOCK):
        x, ids, inside = candidates(source, gathered, number, at, BLOCK, PENALTIES)
        inside = inside & (bin_of(x, peak, scale, BINS) == bin)
        lowest = tl.minimum(lowest, tl.min(tl.where(inside, ordered(x), 2147483647), 0))
        highest = tl.maximum(highest, tl.max(tl.where(inside, ordered(x), -2147483648), 0))
    lowest = lowest.to(tl.int64)
    low = tl.full([], 0, tl.int64)
    high = (highest.to(tl.int64) - lowest + 1) * span
    ways = tl.arange(0, WAYS)
    while high - low > 1:
        step = (high - low + WAYS - 1) // WAYS
        bounds = low + ways * step
        sums = tl.zeros([BLOCK, WAYS], tl.int64)
        for at in range(0, size, BLOCK):
            x, ids, inside = candidates(source, gathered, number, at, BLOCK, PENALTIES)
            inside = inside & (bin_of(x, peak, scale, BINS) == bin)
            weight = addends(x, inside, ranking, kind)
            rank = rank_of(x, ids, lowest, span)
            sums += tl.where(rank[:, None] >= bounds[None, :], weight[:, None], 0)
        reached = tl.sum(sums, 0) + above >= goal
        part = tl.maximum(tl.sum(reached.to(tl.int64), 0) - 1, 0)
        high = tl.minimum(low + (part + 1) * step, high)
        low = low + part * step
    return (low // span + lowest).to(tl.int32), (span - 1 - low % span).to(tl.int32)


@triton.jit
def first_reaching(
    source, gathered, number, ranking, bins, goal, span, kind, BINS: tl.constexpr,
    BLOCK: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """Candidate (ordered logit, id) at which the sum along the ranking reaches the goal.

    `bins` are the sums of the bins. `number`: how many candidates were gathered, and of which bins
    (see `num_candidates`).
    """
    index = tl.arange(0, BINS)
    sums = tl.load(bins + index)
    bin = tl.sum((tl.cumsum(sums, 0) < goal).to(tl.int32), 0)
    bin = tl.minimum(bin, BINS - 1)
    above = tl.sum(tl.where(index < bin, sums, 0), 0)
    size_hint = num_candidates(number, bin, BINS)
    return search_bin(
        source, gathered, size_hint, ranking, bin, above, goal, span, kind, BINS, BLOCK, PENALTIES
    )


@triton.jit
def sum_until(
    source, gathered, number, ranking, bins, value, last, kind, BINS: tl.constexpr,
    BLOCK: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """Sum along the ranking up to a border: logits above `value`, and ids up to `last` at it."""
    peak, scale, _, _ = ranking
    index = tl.arange(0, BINS)
    border = bin_of(unordered(value), peak, scale, BINS)
    total = tl.sum(tl.where(index < border, tl.load(bins + index), 0), 0)
    size_hint = num_candidates(number, border, BINS)
    size = tl.where(size_hint >= 0, size_hint, source[3])
    for at in range(0, size, BLOCK):
        x, ids, inside = candidates(source, gathered, size_hint, at, BLOCK, PENALTIES)
        inside = inside & (bin_of(x, peak, scale, BINS) == border)
        inside = inside & ((ordered(x) > value) | ((ordered(x) == value) & (ids <= last)))
        total += tl.sum(addends(x, inside, ranking, kind), 0)
    return total


@triton.jit
def is_gathered(bin, brackets):
    """Whether a bin is in one of the three ranges of bins that are gathered."""
    first, second, third, fourth, fifth, sixth = brackets
    gathered = (bin >= first) & (bin <= second)
    gathered = gathered | ((bin >= third) & (bin <= fourth))
    return gathered | ((bin >= fifth) & (bin <= sixth))


@triton.jit
def num_candidates(number, bin, BINS: tl.constexpr):
    """Number of gathered candidates if they include all of a bin, otherwise -1 (read the row).

    The last bin is never gathered.
    """
    count, room, brackets = number
    size_hint = is_gathered(bin, brackets) & (bin < BINS - 1) & (count <= room)
    return tl.where(size_hint, count, -1)


# -- First pass: peak, sum and entropy of every row; greedy rows are picked here


# Columns of the summary of a piece of a row.
PEAK = tl.constexpr(0)
TOTAL = tl.constexpr(1)
MOMENT = tl.constexpr(2)
FIRST = tl.constexpr(3)
PARTS = tl.constexpr(4)

# Columns of the state of a row that later passes read (float64).
ACTIVE = tl.constexpr(0)  # the row is sampled
PEAK_AFTER = tl.constexpr(1)  # peak after penalties and temperature
PRE_TEMPERATURE = tl.constexpr(2)  # temperature that is applied before truncation
HAS_INF = tl.constexpr(3)  # the row has +inf logits, see `load_logits`
UNTRUNCATED = tl.constexpr(4)  # no truncation
SHARPNESS = tl.constexpr(5)  # log2(e) / temperature
SCALE = tl.constexpr(6)  # bins per unit of depth
MASS = tl.constexpr(7)  # sum over the ranking, before temperature
RANDOM = tl.constexpr(8)  # random number of the draw
LOG_TOTAL = tl.constexpr(9)  # of the model's distribution
MODEL_PEAK = tl.constexpr(10)
STATE = tl.constexpr(16)

DEEPEST = tl.constexpr(32.0)  # at a larger depth below the peak the weight is 0
MAXIMA_BLOCK = tl.constexpr(128)  # neighbours per block maximum
HALVINGS = tl.constexpr(9)


@triton.jit
def summary(x, ids):
    """Of a piece of a row: its peak, Σ exp(x - peak), Σ exp(x - peak) (x - peak), and where the
    peak first is. A NaN makes the sum NaN; at a peak of ±inf, those that equal it weigh 1 each."""
    num_nan = tl.max((x != x).to(tl.int32), 0)
    x = tl.where(x != x, -float("inf"), x)
    peak = tl.max(x, 0)
    below = -tl.minimum(depth_below(x, peak), 200.0)
    weight = power(below, LOG2E, LOG2E_LOW)
    total = tl.sum(weight.to(tl.float64), 0)
    moment = tl.sum((weight * below).to(tl.float64), 0)
    first = tl.min(tl.where(x == peak, ids, 2147483647), 0)
    return peak, tl.where(num_nan > 0, float("nan"), total), moment, first


@triton.jit
def store_summary(parts, peak, total, moment, first):
    tl.store(parts + PEAK, peak.to(tl.float64))
    tl.store(parts + TOTAL, total)
    tl.store(parts + MOMENT, moment)
    tl.store(parts + FIRST, first.to(tl.float64))


@triton.jit
def combine_summaries(parts, pieces, ROOM: tl.constexpr):
    """Combine the summaries of a row's pieces, in order: peak, total, moment, first peak."""
    index = tl.arange(0, ROOM)
    inside = index < pieces
    parts += index * PARTS
    peaks = tl.load(parts + PEAK, mask=inside, other=-float("inf"))
    totals = tl.load(parts + TOTAL, mask=inside, other=0.0)
    moments = tl.load(parts + MOMENT, mask=inside, other=0.0)
    firsts = tl.load(parts + FIRST, mask=inside, other=2147483647.0)
    peak = tl.max(peaks, 0)
    below = -tl.minimum(depth_below(peaks, peak), 700.0)
    factor = tl.exp(below)
    total = tl.sum(totals * factor, 0)
    moment = tl.sum((moments + below * totals) * factor, 0)
    first = tl.min(tl.where(peaks == peak, firsts, 2147483647.0), 0)
    return peak, total, moment, first.to(tl.int32)


@triton.jit
def summarize_infinite(source, BLOCK: tl.constexpr, PENALTIES: tl.constexpr):
    """Peak, total and first peak of a row that has +inf logits and penalties. Rare."""
    vocabulary = source[3]
    peak = tl.full([], -float("inf"), tl.float64)
    total = tl.zeros([], tl.float64)
    token = tl.zeros([], tl.int32)
    for at in range(0, vocabulary, BLOCK):
        ids = at + tl.arange(0, BLOCK)
        piece_peak, part, _, first = summary(load_logits(source, ids, PENALTIES), ids)
        wide = piece_peak.to(tl.float64)
        higher = tl.maximum(wide, peak)
        total = total * tl.exp(-tl.minimum(depth_below(peak, higher), 700.0))
        total += part * tl.exp(-tl.minimum(depth_below(wide, higher), 700.0))
        token = tl.where(wide > peak, first, token)
        peak = higher
    return peak, total, token


@triton.jit
def reach_of_top_k(block_maxima, count, peak, top_k, deepest, ROOM: tl.constexpr):
    """A depth that contains at least k candidates and few more: k block maxima are above it."""
    index = tl.arange(0, ROOM)
    x = tl.load(block_maxima + index, mask=index < count, other=-float("inf"))
    depth = tl.where(index < count, depth_below(x, peak), float("inf"))
    low = tl.zeros([], tl.float32)
    high = deepest
    for _ in range(HALVINGS):
        middle = (low + high) * 0.5
        enough = tl.sum((depth <= middle).to(tl.int32), 0) >= top_k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high


@triton.jit
def plan_sampling(
    floats, ints, block_maxima, blocks, state, vocabulary, peak, total, has_inf, unit,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store what the later passes need to know of a row that is sampled."""
    temperature = tl.maximum(tl.load(floats + TEMPERATURE), 1.0e-6)
    top_p = tl.load(floats + TOP_P)
    min_p = tl.load(floats + MIN_P)
    top_k = tl.load(ints + TOP_K)
    random = uniform(tl.load(ints + SEED), tl.load(ints + SAMPLE), tl.load(ints + POSITION))
    untruncated = (top_k <= 0) & (top_p >= 1.0) & (min_p <= 0.0)
    log_size = tl.log(vocabulary.to(tl.float64))
    deepest = DEEPEST * tl.maximum(temperature, 1.0)
    pre_temperature = tl.full([], 1.0, tl.float32)
    if untruncated:  # as the chain: divide in float32, then rank
        pre_temperature = tl.maximum(tl.load(floats + TEMPERATURE).to(tl.float32), 1.0e-6)
        if pre_temperature != 1.0:
            peak = tl.div_rn(peak, pre_temperature)
        temperature = tl.full([], 1.0, tl.float64)
        # Candidates below this depth have less mass than what follows the random number.
        deepest = tl.minimum(log_size - tl.log(1.0 - random), DEEPEST)
    elif top_k > 0:
        if has_inf == 0:
            deepest = reach_of_top_k(
                block_maxima, blocks, peak, top_k, deepest.to(tl.float32), BLOCKS
            ).to(tl.float64)  # fmt: skip
    elif top_p < 1.0:  # below: less mass than top-p cuts off
        outside = log_size - tl.log((1.0 - top_p * (1.0 - 1.0e-6)) * total)
        deepest = tl.minimum(outside + 1.0e-3, deepest)
    if (min_p > 0.0) & ((top_p >= 1.0) | (top_k <= 0)):
        rounding = tl.abs(peak).to(tl.float64) * 1.0e-6  # rounding error of the bound in float32
        deepest = tl.minimum(deepest, 1.0e-3 + rounding - tl.log(min_p))
    tl.store(state + PEAK_AFTER, peak.to(tl.float64))
    tl.store(state + PRE_TEMPERATURE, pre_temperature.to(tl.float64))
    tl.store(state + HAS_INF, has_inf.to(tl.float64))
    tl.store(state + UNTRUNCATED, untruncated.to(tl.float64))
    tl.store(state + SHARPNESS, 1.4426950408889634 / temperature)
    # A little deeper: candidates at exactly this depth must not fall into the last bin.
    tl.store(state + SCALE, 1.0 / (deepest * 1.001 + 1.0e-3))
    tl.store(state + MASS, total * unit)
    tl.store(state + RANDOM, random)


@triton.jit
def finish_summary(
    logits, floats, ints, counts, model_parts, edited_parts, block_maxima, state, picks, logprobs,
    summaries, vocabulary, pieces, unit, PIECE: tl.constexpr, ROOM: tl.constexpr,
    PENALTIES: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Combine the pieces of a row; pick its token if it is greedy."""
    model_peak, model_total, model_moment, token = combine_summaries(model_parts, pieces, ROOM)
    peak, total = model_peak, model_total
    has_inf = tl.full([], 0, tl.int32)
    if PENALTIES:
        peak, total, _, token = combine_summaries(edited_parts, pieces, ROOM)
        if has_penalties(floats, ints):
            if model_peak == float("inf"):
                has_inf = tl.full([], 1, tl.int32)
                no_temperature = tl.full([], 1.0, tl.float32)
                source = (
                    logits, counts, floats, vocabulary, has_inf != 0, has_inf != 0, no_temperature,
                )  # fmt: skip
                peak, total, token = summarize_infinite(source, PIECE, PENALTIES)
    log_total = tl.log(model_total)
    tl.store(summaries, model_peak)
    tl.store(summaries + 1, model_peak + log_total)
    tl.store(summaries + 2, tl.maximum(log_total - model_moment / model_total, 0.0))
    is_valid = (model_peak > -float("inf")) & (model_total == model_total)
    is_valid = is_valid & (peak > -float("inf")) & (total == total)
    is_sampled = is_valid & (tl.load(floats + TEMPERATURE) != 0.0)
    if SAMPLED:
        tl.store(state + ACTIVE, is_sampled.to(tl.float64))
        if is_sampled:
            tl.store(state + LOG_TOTAL, log_total)
            tl.store(state + MODEL_PEAK, model_peak)
            plan_sampling(
                floats, ints, block_maxima, tl.cdiv(vocabulary, MAXIMA_BLOCK), state, vocabulary,
                peak.to(tl.float32), total, has_inf, unit, ROOM * (PIECE // MAXIMA_BLOCK),
            )  # fmt: skip
    logit = tl.load(logits + token, mask=is_valid, other=0.0).to(tl.float64)
    tl.store(picks, tl.where(is_valid, token, -1).to(tl.int64))
    tl.store(logprobs, tl.where(is_valid, -depth_below(logit, model_peak) - log_total, 0.0))


@triton.jit
def summarize(
    logits, stride, floats, ints, counts, model_parts, edited_parts, block_maxima, state, arrived,
    picks, logprobs, summaries, vocabulary, unit, PIECE: tl.constexpr, ROOM: tl.constexpr,
    PENALTIES: tl.constexpr, PDL: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Summarize the pieces of every row before and after penalties; then the row."""
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    pieces = tl.cdiv(vocabulary, PIECE)
    logits += row * stride
    floats += row * SETTINGS
    ints += row * SETTINGS
    counts += row * vocabulary
    model_parts += row * pieces * PARTS
    edited_parts += row * pieces * PARTS
    block_maxima += row * ROOM * (PIECE // MAXIMA_BLOCK)
    for piece in range(tl.program_id(1), pieces, tl.num_programs(1)):
        ids = piece * PIECE + tl.arange(0, PIECE)
        inside = ids < vocabulary
        x = tl.load(logits + ids, mask=inside, other=-float("inf")).to(tl.float32)
        peak, total, moment, first = summary(x, ids)
        store_summary(model_parts + piece * PARTS, peak, total, moment, first)
        if PENALTIES:
            if has_penalties(floats, ints):
                x = penalized(x, tl.load(counts + ids, mask=inside, other=0), floats)
                peak, total, moment, first = summary(x, ids)
            store_summary(edited_parts + piece * PARTS, peak, total, moment, first)
        if SAMPLED:
            if tl.load(ints + TOP_K) > 0:
                piece_peak = tl.max(tl.reshape(x, [PIECE // MAXIMA_BLOCK, MAXIMA_BLOCK]), 1)
                tl.store(
                    block_maxima
                    + piece * (PIECE // MAXIMA_BLOCK)
                    + tl.arange(0, PIECE // MAXIMA_BLOCK),
                    piece_peak,
                )
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1) == tl.num_programs(1) - 1:
        tl.store(arrived + row, 0)
        finish_summary(
            logits, floats, ints, counts, model_parts, edited_parts, block_maxima,
            state + row * STATE, picks + row, logprobs + row, summaries + row * 3, vocabulary,
            pieces, unit, PIECE, ROOM, PENALTIES, SAMPLED,
        )  # fmt: skip


# -- Second and third pass, for sampled rows: truncation, and the sampled token

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
    PIECE: tl.constexpr, BINS: tl.constexpr, PENALTIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum the candidates of each bin: bins [rows, kinds, BINS]."""
    wait(PDL)
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
    PDL: tl.constexpr,
):  # fmt: skip
    """Store the candidates of the chosen bins in `values` and `tokens` [rows, ROOM]."""
    wait(PDL)
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
    PENALTIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Pick the token of every sampled row; reset the bins."""
    wait(PDL)
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
