"""The ranking of a row's candidates (highest logit first, ties by lower id): sums along it.

`kind` says what is summed: the number of candidates, their weights exp(logit - peak), or these
after temperature, all as int64. Bins divide the ranking by depth below the peak; the last bin holds
all candidates below the relevant depth.
"""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.pick.numbers import (
    LOG2E,
    depth_below,
    ordered,
    power,
    unordered,
)
from unspool.backends.cuda.kernels.pick.penalties import load_logits

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
