"""First pass: peak, sum and entropy of every row; greedy rows are picked here."""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.pick.numbers import (
    LOG2E,
    LOG2E_LOW,
    depth_below,
    power,
    uniform,
)
from unspool.backends.cuda.kernels.pick.penalties import (
    MIN_P,
    POSITION,
    SAMPLE,
    SEED,
    SETTINGS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    has_penalties,
    load_logits,
    penalized,
)

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
    PENALTIES: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Summarize the pieces of every row before and after penalties; then the row."""
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
