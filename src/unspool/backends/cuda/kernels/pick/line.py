"""A row's candidates as a line, likeliest first, equals by lower id: sums along it, places on it.

What is summed up (`kind`): the number of candidates, their weights exp(logit - peak), or these
after temperature, all as int64. Bins divide the line by depth below the peak; the last one holds
all that lies beyond the depth that matters.
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
from unspool.backends.cuda.kernels.pick.penalties import levels

COUNTED = tl.constexpr(0)
WEIGHED = tl.constexpr(1)
WARMED = tl.constexpr(2)

WAYS = tl.constexpr(16)  # into how many parts a range is divided by one look at the candidates


@triton.jit
def bin_of(x, peak, scale, BINS: tl.constexpr):
    return tl.minimum(depth_below(x, peak) * scale, BINS - 1.0).to(tl.int32)


@triton.jit
def weights(x, peak, cool, unit):
    """exp((logit - peak) / temperature) in whole units; `cool` is log2(e) over the temperature."""
    base = cool.to(tl.float32)
    rest = (cool - base.to(tl.float64)).to(tl.float32)
    weight = power(-tl.minimum(depth_below(x, peak), 200.0 / base), base, rest)
    return (weight * unit).to(tl.int64)


@triton.jit
def addends(x, inside, line, kind):
    """What each candidate adds to a sum."""
    peak, _, cool, unit = line
    cool = tl.where(kind == WEIGHED, LOG2E, cool)
    weight = tl.where(kind == COUNTED, 1, weights(x, peak, cool, unit))
    return tl.where(inside, weight, 0)


@triton.jit
def candidates(source, found, number, at, BLOCK: tl.constexpr, PENALTIES: tl.constexpr):
    """Some candidates: those gathered (`number` of them), or, where that is -1, of the whole row.

    Gives their logits, ids, and which of them there are.
    """
    place = at + tl.arange(0, BLOCK)
    ids = place
    inside = place < source[3]
    if number >= 0:
        inside = place < number
        x = tl.load(found[0] + place, mask=inside, other=-float("inf"))
        ids = tl.load(found[1] + place, mask=inside, other=0)
    else:
        x = levels(source, ids, PENALTIES)
    return x, ids, inside


@triton.jit
def rank_of(x, ids, lowest, span):
    """Whole numbers in the order of the line, the larger the earlier, each one candidate's own."""
    return (ordered(x).to(tl.int64) - lowest) * span + (span - 1 - ids)


@triton.jit
def narrowed(
    source, found, number, line, bin, above, goal, span, kind, BINS: tl.constexpr,
    BLOCK: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """`first_reaching` in a bin, by narrowing the range of ranks in which it lies."""
    peak, scale, _, _ = line
    size = tl.where(number >= 0, number, source[3])
    lowest = tl.full([], 2147483647, tl.int32)
    highest = tl.full([], -2147483648, tl.int32)
    for at in range(0, size, BLOCK):
        x, ids, inside = candidates(source, found, number, at, BLOCK, PENALTIES)
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
            x, ids, inside = candidates(source, found, number, at, BLOCK, PENALTIES)
            inside = inside & (bin_of(x, peak, scale, BINS) == bin)
            weight = addends(x, inside, line, kind)
            rank = rank_of(x, ids, lowest, span)
            sums += tl.where(rank[:, None] >= bounds[None, :], weight[:, None], 0)
        reached = tl.sum(sums, 0) + above >= goal
        part = tl.maximum(tl.sum(reached.to(tl.int64), 0) - 1, 0)
        high = tl.minimum(low + (part + 1) * step, high)
        low = low + part * step
    return (low // span + lowest).to(tl.int32), (span - 1 - low % span).to(tl.int32)


@triton.jit
def first_reaching(
    source, found, number, line, bins, goal, span, kind, BINS: tl.constexpr,
    BLOCK: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """The candidate, as (ordered logit, id), at which the sum along the line reaches the goal.

    `bins` are the sums in the bins. `number` says how many candidates were gathered, and of which
    bins: see `in_reach`.
    """
    place = tl.arange(0, BINS)
    sums = tl.load(bins + place)
    bin = tl.sum((tl.cumsum(sums, 0) < goal).to(tl.int32), 0)
    bin = tl.minimum(bin, BINS - 1)
    above = tl.sum(tl.where(place < bin, sums, 0), 0)
    there = in_reach(number, bin, BINS)
    return narrowed(
        source, found, there, line, bin, above, goal, span, kind, BINS, BLOCK, PENALTIES
    )


@triton.jit
def sum_until(
    source, found, number, line, bins, value, last, kind, BINS: tl.constexpr,
    BLOCK: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """The sum along the line up to a border: over what is above `value` or, up to `last`, at it."""
    peak, scale, _, _ = line
    place = tl.arange(0, BINS)
    border = bin_of(unordered(value), peak, scale, BINS)
    total = tl.sum(tl.where(place < border, tl.load(bins + place), 0), 0)
    there = in_reach(number, border, BINS)
    size = tl.where(there >= 0, there, source[3])
    for at in range(0, size, BLOCK):
        x, ids, inside = candidates(source, found, there, at, BLOCK, PENALTIES)
        inside = inside & (bin_of(x, peak, scale, BINS) == border)
        inside = inside & ((ordered(x) > value) | ((ordered(x) == value) & (ids <= last)))
        total += tl.sum(addends(x, inside, line, kind), 0)
    return total


@triton.jit
def is_gathered(bin, brackets):
    """Whether a bin's candidates are gathered: those in one of three ranges of bins."""
    first, second, third, fourth, fifth, sixth = brackets
    found = (bin >= first) & (bin <= second)
    found = found | ((bin >= third) & (bin <= fourth))
    return found | ((bin >= fifth) & (bin <= sixth))


@triton.jit
def in_reach(number, bin, BINS: tl.constexpr):
    """How many candidates to look at for those of a bin: all gathered ones if it is among them
    and they found room, otherwise -1: the whole row. (The last bin's are never gathered.)"""
    count, room, brackets = number
    there = is_gathered(bin, brackets) & (bin < BINS - 1) & (count <= room)
    return tl.where(there, count, -1)
