"""Softmax over keys that come in tiles, and over pieces of a text that were looked at apart.

What is kept of the keys so far: the highest score (`peak`, in powers of two), the sum of the
weights relative to it (`total`), and the values added up with these weights (`mixed`).

The weights are added up by `tl.dot` as well, against ones: sixteen equal columns, since tensor
cores take no fewer. Its order does not depend on how many rows a program has, so that a query gets
the same bits whoever computes it, decoding or a prompt; and no threads have to meet for it.
"""

import triton
import triton.language as tl


@triton.jit
def nothing(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """No key seen yet."""
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS, 16), tl.float32)
    return peak, total, tl.zeros((ROWS, WIDTH), tl.float32)


@triton.jit
def scores_of(query, key, scale, SOFTCAP: tl.constexpr):
    """How well keys fit queries, in powers of two: exp2 of a difference is its weight."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if SOFTCAP > 0:
        # `scale` leads to 2x, for tanh(x) = 1 - 2 / (exp(2x) + 1); log2(e) is put in behind.
        bent = 1.0 - 2.0 / (tl.exp2(scores * scale) + 1.0)
        return bent * (SOFTCAP * 1.4426950408889634)
    return scores * scale


@triton.jit
def finite(peak):
    """A peak that can be subtracted, also where nothing has been seen."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def add_tile(scores, value, peak, total, mixed, TILE: tl.constexpr):
    """One more tile of keys, its scores [rows, TILE] (-inf: hidden) and values [TILE, width]."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    base = finite(higher)
    fade = tl.exp2(peak - base)[:, None]
    weights = tl.exp2(scores - base[:, None]).to(value.dtype)
    ones = tl.full((TILE, 16), 1.0, tl.float32).to(value.dtype)
    total = tl.dot(weights, ones, total * fade, input_precision="ieee")
    mixed = tl.dot(weights, value, mixed * fade, input_precision="ieee")
    return higher, total, mixed


@triton.jit
def join(peak, total, mixed, its_peak, its_total, its_mixed):
    """What was seen so far, and the piece behind it."""
    higher = tl.maximum(peak, its_peak)
    base = finite(higher)
    fade, gain = tl.exp2(peak - base)[:, None], tl.exp2(its_peak - base)[:, None]
    return higher, total * fade + its_total * gain, mixed * fade + its_mixed * gain


@triton.jit
def outcome(peak, total, mixed, heads, real, sinks, SINKS: tl.constexpr):
    """The values as the weights mix them. A sink takes its share of weight and gives nothing."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        _, total, mixed = join(peak, total, mixed, sink, total * 0.0 + 1.0, mixed * 0.0)
    return mixed / tl.max(total, 1)[:, None]


@triton.jit
def piece_power(first, end, TILE: tl.constexpr, PIECES: tl.constexpr):
    """A piece of a text has 2 ** this tiles: as many as make PIECES of it, and one more at most,
    since pieces begin at fixed places. `first` to `end`: the positions a query sees."""
    least = ((end - first + TILE - 1) // TILE + PIECES - 1) // PIECES
    # The next power of two is in the exponent of a float.
    return ((2 * least - 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
