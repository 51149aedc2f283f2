"""Rows of a canvas: exclude a token, and return what the order of unmasking needs."""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.sampling import depth_below

# Columns of a row's canvas settings and of its details, as in `sampling/picker.py`.
EXCLUDED = tl.constexpr(0)
TARGET = tl.constexpr(1)
CANVAS = tl.constexpr(2)
ENTROPY = tl.constexpr(0)
MARGIN = tl.constexpr(1)
TARGET_LOGPROB = tl.constexpr(2)
DETAILS = tl.constexpr(3)


@triton.jit
def exclude_tokens(logits, stride, canvas):
    """Set the logit of each row's excluded token to -inf."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(canvas + row * CANVAS + EXCLUDED)
    lowest = tl.full([], -float("inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + row * stride + token, lowest, mask=token >= 0)


@triton.jit
def measure_rows(logits, stride, canvas, summaries, details, vocabulary, BLOCK: tl.constexpr):
    """Store each row's entropy, its margin, and the log-probability of its target."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    summaries += row * 3
    details += row * DETAILS
    peak = tl.load(summaries)
    log_total = tl.load(summaries + 1) - peak
    count = tl.full([], 0, tl.int32)  # of logits that equal the peak
    second = tl.full([], -float("inf"), tl.float32)  # the largest logit below the peak
    for at in range(0, vocabulary, BLOCK):
        ids = at + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < vocabulary, other=-float("inf")).to(tl.float32)
        is_peak = x.to(tl.float64) == peak
        count += tl.sum(is_peak.to(tl.int32), 0)
        second = tl.maximum(second, tl.max(tl.where(is_peak, -float("inf"), x), 0))
    below = tl.where(count > 1, 0.0, depth_below(second.to(tl.float64), peak))
    tl.store(details + ENTROPY, tl.load(summaries + 2))
    tl.store(details + MARGIN, tl.exp(-log_total) - tl.exp(-below - log_total))
    target = tl.load(canvas + row * CANVAS + TARGET)
    logit = tl.load(logits + target, mask=target >= 0, other=0.0).to(tl.float64)
    logprob = -depth_below(logit, peak) - log_total
    tl.store(details + TARGET_LOGPROB, tl.where(target >= 0, logprob, 0.0))
