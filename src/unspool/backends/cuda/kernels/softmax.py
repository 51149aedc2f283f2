"""Online softmax over tiles of keys, and the combination of pieces of a context.

The state is the maximum score (`peak`, base 2), the sum of weights relative to it (`total`), and
the weighted sum of values (`mixed`).

The weights are summed by `tl.dot` with ones too (sixteen equal columns, the minimum of tensor
cores). Its order does not depend on the number of rows of a program, so decode and prefill give the
same bits for a query; and it needs no synchronization of threads.
"""

import triton
import triton.language as tl


@triton.jit
def empty_state(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """State before the first key."""
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS, 16), tl.float32)
    return peak, total, tl.zeros((ROWS, WIDTH), tl.float32)


@triton.jit
def scores_of(query, key, scale, SOFTCAP: tl.constexpr):
    """Attention scores in base 2 (for exp2), with optional soft capping."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if SOFTCAP > 0:
        # `scale` gives 2x, for tanh(x) = 1 - 2 / (exp(2x) + 1); log2(e) is multiplied afterwards.
        capped = 1.0 - 2.0 / (tl.exp2(scores * scale) + 1.0)
        return capped * (SOFTCAP * 1.4426950408889634)
    return scores * scale


@triton.jit
def finite(peak):
    """A peak that can be subtracted: 0 where no key was visible."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def add_tile(scores, value, peak, total, mixed, TILE: tl.constexpr):
    """Add a tile: scores [rows, TILE] (-inf: masked) and values [TILE, width]."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = finite(new_peak)
    fade = tl.exp2(peak - base)[:, None]
    weights = tl.exp2(scores - base[:, None]).to(value.dtype)
    ones = tl.full((TILE, 16), 1.0, tl.float32).to(value.dtype)
    total = tl.dot(weights, ones, total * fade, input_precision="ieee")
    mixed = tl.dot(weights, value, mixed * fade, input_precision="ieee")
    return new_peak, total, mixed


@triton.jit
def combine(peak, total, mixed, piece_peak, piece_total, piece_mixed):
    """Combine a state with that of the next piece."""
    new_peak = tl.maximum(peak, piece_peak)
    base = finite(new_peak)
    fade, gain = tl.exp2(peak - base)[:, None], tl.exp2(piece_peak - base)[:, None]
    return new_peak, total * fade + piece_total * gain, mixed * fade + piece_mixed * gain


@triton.jit
def normalize(peak, total, mixed, heads, real, sinks, SINKS: tl.constexpr):
    """Output of attention. A sink adds to the sum of weights but has no value."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        _, total, mixed = combine(peak, total, mixed, sink, total * 0.0 + 1.0, mixed * 0.0)
    return mixed / tl.max(total, 1)[:, None]


@triton.jit
def piece_power(first, end, TILE: tl.constexpr, PIECES: tl.constexpr):
    """log2 of the number of tiles per piece, so that there are about PIECES pieces.

    There may be one more, since pieces begin at fixed positions. `first` to `end`: the visible
    positions of a query.
    """
    min_tiles = ((end - first + TILE - 1) // TILE + PIECES - 1) // PIECES
    # The next power of two is in the exponent of a float.
    return ((2 * min_tiles - 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
