"""Penalties: token counts of the history, and logits of a row after penalties."""

import triton
import triton.language as tl

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
