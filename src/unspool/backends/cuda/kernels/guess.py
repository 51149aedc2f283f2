"""Greedy token of a drafting head, picked on the device."""

import triton
import triton.language as tl


@triton.jit
def greedy_token(logits, ids, temperature, token, logprob, N, NP: tl.constexpr):
    """Token with the largest logit (ties: the first), and its log-probability.

    NP is the power of two >= N.
    """
    indices = tl.arange(0, NP)
    inside = indices < N
    x = tl.load(logits + indices, mask=inside, other=-float("inf")).to(tl.float32)
    peak = tl.max(x, 0)
    first = tl.min(tl.where(x == peak, indices, NP), 0)
    first = tl.minimum(first, N - 1)  # NaN logits: any valid token
    scaled = (x - peak) / tl.load(temperature).to(tl.float32)
    tl.store(token, tl.load(ids + first))
    tl.store(logprob, -tl.log(tl.sum(tl.where(inside, tl.exp(scaled), 0.0), 0)).to(tl.float64))
