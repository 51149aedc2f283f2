"""The first walk: peak, sum and entropy of every row; greedy rows are picked."""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.pick.numbers import (
    LOG2E,
    LOG2E_REST,
    depth_below,
    power,
    uniform,
)
from unspool.backends.cuda.kernels.pick.penalties import (
    MIN_P,
    NUMBERS,
    POSITION,
    SAMPLE,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    has_penalties,
    levels,
    penalized,
)

# What is known of a piece of a row.
PEAK = tl.constexpr(0)
TOTAL = tl.constexpr(1)
MOMENT = tl.constexpr(2)
FIRST = tl.constexpr(3)
PARTS = tl.constexpr(4)

# What the later walks have to know of a row (float64).
ACTIVE = tl.constexpr(0)  # there is something left to do
TOP = tl.constexpr(1)  # the peak of the line
WARMTH = tl.constexpr(2)  # what logits are divided by before anything else
SURE = tl.constexpr(3)  # see `levels`
WHOLE = tl.constexpr(4)  # no truncation
COOL = tl.constexpr(5)  # log2(e) over the temperature
SCALE = tl.constexpr(6)  # bins a unit of depth
MASS = tl.constexpr(7)  # the sum over the whole line, before temperature
NUMBER = tl.constexpr(8)  # the number drawn
LOG_TOTAL = tl.constexpr(9)  # of the model's own distribution
OWN_PEAK = tl.constexpr(10)
STATE = tl.constexpr(16)

DEEPEST = tl.constexpr(32.0)  # farther below the peak, a candidate weighs nothing
MAXIMA = tl.constexpr(128)  # of so many neighbours the largest is kept
HALVINGS = tl.constexpr(9)


@triton.jit
def summary(x, ids):
    """Of a piece of a row: its peak, Σ exp(x - peak), Σ exp(x - peak) (x - peak), and where the
    peak first is. A NaN makes the sum NaN; at a peak of ±inf, those that equal it weigh 1 each."""
    broken = tl.max((x != x).to(tl.int32), 0)
    x = tl.where(x != x, -float("inf"), x)
    peak = tl.max(x, 0)
    below = -tl.minimum(depth_below(x, peak), 200.0)
    weight = power(below, LOG2E, LOG2E_REST)
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
    parts += place * PARTS
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
def mended(source, BLOCK: tl.constexpr, PENALTIES: tl.constexpr):
    """Peak, total and first peak of a row that is sure and penalized: only now it is known that
    it is. (Nobody's model gives this twice.)"""
    vocabulary = source[3]
    peak = tl.full([], -float("inf"), tl.float64)
    total = tl.zeros([], tl.float64)
    token = tl.zeros([], tl.int32)
    for at in range(0, vocabulary, BLOCK):
        ids = at + tl.arange(0, BLOCK)
        best, part, _, first = summary(levels(source, ids, PENALTIES), ids)
        wide = best.to(tl.float64)
        higher = tl.maximum(wide, peak)
        total = total * tl.exp(-tl.minimum(depth_below(peak, higher), 700.0))
        total += part * tl.exp(-tl.minimum(depth_below(wide, higher), 700.0))
        token = tl.where(wide > peak, first, token)
        peak = higher
    return peak, total, token


@triton.jit
def reach_of_top_k(tops, count, peak, top_k, deepest, ROOM: tl.constexpr):
    """A depth in which there are at least k candidates, and few others: so many maxima of blocks
    are in it, and these are candidates."""
    place = tl.arange(0, ROOM)
    x = tl.load(tops + place, mask=place < count, other=-float("inf"))
    depth = tl.where(place < count, depth_below(x, peak), float("inf"))
    low = tl.zeros([], tl.float32)
    high = deepest
    for _ in range(HALVINGS):
        middle = (low + high) * 0.5
        enough = tl.sum((depth <= middle).to(tl.int32), 0) >= top_k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high


@triton.jit
def plan(
    floats, ints, tops, blocks, state, vocabulary, peak, total, sure, unit, BLOCKS: tl.constexpr
):  # fmt: skip
    """How the later walks are to go about a row that draws."""
    temperature = tl.maximum(tl.load(floats + TEMPERATURE), 1.0e-6)
    top_p = tl.load(floats + TOP_P)
    min_p = tl.load(floats + MIN_P)
    top_k = tl.load(ints + TOP_K)
    number = uniform(tl.load(ints + SEED), tl.load(ints + SAMPLE), tl.load(ints + POSITION))
    whole = (top_k <= 0) & (top_p >= 1.0) & (min_p <= 0.0)
    size = tl.log(vocabulary.to(tl.float64))
    deepest = DEEPEST * tl.maximum(temperature, 1.0)
    warmth = tl.full([], 1.0, tl.float32)
    if whole:  # the chain divides in float32, and orders what comes out
        warmth = tl.maximum(tl.load(floats + TEMPERATURE).to(tl.float32), 1.0e-6)
        if warmth != 1.0:
            peak = tl.div_rn(peak, warmth)
        temperature = tl.full([], 1.0, tl.float64)
        # What lies beyond this depth has less mass than what is behind the number drawn.
        deepest = tl.minimum(size - tl.log(1.0 - number), DEEPEST)
    elif top_k > 0:
        if sure == 0:
            deepest = reach_of_top_k(
                tops, blocks, peak, top_k, deepest.to(tl.float32), BLOCKS
            ).to(tl.float64)  # fmt: skip
    elif top_p < 1.0:  # less mass than what top-p leaves out
        outside = size - tl.log((1.0 - top_p * (1.0 - 1.0e-6)) * total)
        deepest = tl.minimum(outside + 1.0e-3, deepest)
    if (min_p > 0.0) & ((top_p >= 1.0) | (top_k <= 0)):
        grain = tl.abs(peak).to(tl.float64) * 1.0e-6  # as far as float32 may round the bound
        deepest = tl.minimum(deepest, 1.0e-3 + grain - tl.log(min_p))
    tl.store(state + TOP, peak.to(tl.float64))
    tl.store(state + WARMTH, warmth.to(tl.float64))
    tl.store(state + SURE, sure.to(tl.float64))
    tl.store(state + WHOLE, whole.to(tl.float64))
    tl.store(state + COOL, 1.4426950408889634 / temperature)
    # A little deeper: what lies at this very depth is not to fall into the last bin.
    tl.store(state + SCALE, 1.0 / (deepest * 1.001 + 1.0e-3))
    tl.store(state + MASS, total * unit)
    tl.store(state + NUMBER, number)


@triton.jit
def settle(
    logits, floats, ints, counts, own, edited, tops, state, picks, logprobs, about, vocabulary,
    pieces, unit, PIECE: tl.constexpr, ROOM: tl.constexpr, PENALTIES: tl.constexpr,
    SAMPLED: tl.constexpr,
):  # fmt: skip
    """What a whole row is, once all its pieces are known."""
    own_peak, own_total, own_moment, token = joined(own, pieces, ROOM)
    peak, total = own_peak, own_total
    sure = tl.full([], 0, tl.int32)
    if PENALTIES:
        peak, total, _, token = joined(edited, pieces, ROOM)
        if has_penalties(floats, ints):
            if own_peak == float("inf"):
                sure = tl.full([], 1, tl.int32)
                one = tl.full([], 1.0, tl.float32)
                source = (logits, counts, floats, vocabulary, sure != 0, sure != 0, one)
                peak, total, token = mended(source, PIECE, PENALTIES)
    log_total = tl.log(own_total)
    tl.store(about, own_peak)
    tl.store(about + 1, own_peak + log_total)
    tl.store(about + 2, tl.maximum(log_total - own_moment / own_total, 0.0))
    good = (own_peak > -float("inf")) & (own_total == own_total)
    good = good & (peak > -float("inf")) & (total == total)
    draws = good & (tl.load(floats + TEMPERATURE) != 0.0)
    if SAMPLED:
        tl.store(state + ACTIVE, draws.to(tl.float64))
        if draws:
            tl.store(state + LOG_TOTAL, log_total)
            tl.store(state + OWN_PEAK, own_peak)
            plan(
                floats, ints, tops, tl.cdiv(vocabulary, MAXIMA), state, vocabulary,
                peak.to(tl.float32), total, sure, unit, ROOM * (PIECE // MAXIMA),
            )  # fmt: skip
    level = tl.load(logits + token, mask=good, other=0.0).to(tl.float64)
    tl.store(picks, tl.where(good, token, -1).to(tl.int64))
    tl.store(logprobs, tl.where(good, -depth_below(level, own_peak) - log_total, 0.0))


@triton.jit
def measure(
    logits, stride, floats, ints, counts, own, edited, tops, state, arrived, picks, logprobs, about,
    vocabulary, unit, PIECE: tl.constexpr, ROOM: tl.constexpr, PENALTIES: tl.constexpr,
    SAMPLED: tl.constexpr,
):  # fmt: skip
    """Every piece of every row, as the model gave it and after penalties; then the whole row."""
    row = tl.program_id(0).to(tl.int64)
    pieces = tl.cdiv(vocabulary, PIECE)
    logits += row * stride
    floats += row * NUMBERS
    ints += row * NUMBERS
    counts += row * vocabulary
    own += row * pieces * PARTS
    edited += row * pieces * PARTS
    tops += row * ROOM * (PIECE // MAXIMA)
    for piece in range(tl.program_id(1), pieces, tl.num_programs(1)):
        ids = piece * PIECE + tl.arange(0, PIECE)
        inside = ids < vocabulary
        x = tl.load(logits + ids, mask=inside, other=-float("inf")).to(tl.float32)
        peak, total, moment, first = summary(x, ids)
        keep(own + piece * PARTS, peak, total, moment, first)
        if PENALTIES:
            if has_penalties(floats, ints):
                x = penalized(x, tl.load(counts + ids, mask=inside, other=0), floats)
                peak, total, moment, first = summary(x, ids)
            keep(edited + piece * PARTS, peak, total, moment, first)
        if SAMPLED:
            if tl.load(ints + TOP_K) > 0:
                best = tl.max(tl.reshape(x, [PIECE // MAXIMA, MAXIMA]), 1)
                tl.store(tops + piece * (PIECE // MAXIMA) + tl.arange(0, PIECE // MAXIMA), best)
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1) == tl.num_programs(1) - 1:
        tl.store(arrived + row, 0)
        settle(
            logits, floats, ints, counts, own, edited, tops, state + row * STATE, picks + row,
            logprobs + row, about + row * 3, vocabulary, pieces, unit, PIECE, ROOM, PENALTIES,
            SAMPLED,
        )  # fmt: skip
