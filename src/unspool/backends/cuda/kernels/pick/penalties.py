"""What was written before, counted on the device, and the logits of a row after it was."""

import triton
import triton.language as tl

# A row's settings, as `sampling/picker.py` orders them.
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
NUMBERS = tl.constexpr(6)


@triton.jit
def has_penalties(floats, ints):
    """Whether a row's penalties change anything."""
    active = (tl.load(floats + REPETITION) != 1.0) | (tl.load(floats + FREQUENCY) != 0.0)
    active = active | (tl.load(floats + PRESENCE) != 0.0)
    return active & (tl.load(ints + HISTORY_END) > tl.load(ints + HISTORY_START))


@triton.jit
def resolve(floats, ints, history, previous, tokens, BLOCK: tl.constexpr):
    """The tokens that each row's history means: its entry -1-n is the n-th of `previous`."""
    row = tl.program_id(0).to(tl.int64)
    floats += row * NUMBERS
    ints += row * NUMBERS
    if has_penalties(floats, ints):
        end = tl.load(ints + HISTORY_END)
        for at in range(tl.load(ints + HISTORY_START), end, BLOCK):
            place = at + tl.arange(0, BLOCK)
            token = tl.load(history + place, mask=place < end, other=0)
            picked = tl.load(previous - 1 - token, mask=token < 0, other=0)
            tl.store(tokens + place, tl.where(token < 0, picked, token), mask=place < end)


@triton.jit
def tally(floats, ints, tokens, counts, vocabulary, CLEAR: tl.constexpr, BLOCK: tl.constexpr):
    """Counts each row's tokens into `counts` [rows, vocabulary], or makes these 0 again."""
    row = tl.program_id(0).to(tl.int64)
    floats += row * NUMBERS
    ints += row * NUMBERS
    counts += row * vocabulary
    if has_penalties(floats, ints):
        end = tl.load(ints + HISTORY_END)
        for at in range(tl.load(ints + HISTORY_START), end, BLOCK):
            place = at + tl.arange(0, BLOCK)
            token = tl.load(tokens + place, mask=place < end, other=-1)
            known = (token >= 0) & (token < vocabulary)
            if CLEAR:
                tl.store(counts + token, 0, mask=known)
            else:
                tl.atomic_add(counts + token, 1, mask=known, sem="relaxed")


@triton.jit
def penalized(x, times, floats):
    """Logits of tokens that occurred so many times; in float32, each step rounded, as the chain."""
    by = tl.load(floats + REPETITION).to(tl.float32)
    less = (tl.load(floats + FREQUENCY) * times.to(tl.float64)).to(tl.float32)
    changed = tl.where(x > 0, tl.div_rn(x, by + tl.zeros_like(x)), x * by)
    changed = changed - less - tl.load(floats + PRESENCE).to(tl.float32)
    return tl.where(times > 0, changed, x)


@triton.jit
def levels(source, ids, PENALTIES: tl.constexpr):
    """The logits of some tokens, in float32, as the stages after the penalties see them.

    `source` is a row: where its logits, counts and floats are, the vocabulary, whether it has
    penalties, whether it is `sure` (has logits of +inf, which alone remain, as equals), and the
    `warmth` that all are divided by (1: not).
    """
    logits, counts, floats, vocabulary, edits, sure, warmth = source
    inside = ids < vocabulary
    x = tl.load(logits + ids, mask=inside, other=-float("inf")).to(tl.float32)
    if PENALTIES:
        if edits:
            if sure:
                x = tl.where(x == float("inf"), 0.0, -float("inf"))
            x = penalized(x, tl.load(counts + ids, mask=inside, other=0), floats)
    if warmth != 1.0:
        x = tl.div_rn(x, warmth + tl.zeros_like(x))
    return x
