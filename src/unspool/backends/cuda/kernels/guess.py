"""The likeliest token of a drafting head, chosen where its logits are."""

import triton
import triton.language as tl


@triton.jit
def guess(logits, ids, temperature, token, chance, N, NP: tl.constexpr):
    """The token with the largest logit, and its log-probability. NP is the power of two that holds
    N; of several that are as large the first one is taken."""
    places = tl.arange(0, NP)
    inside = places < N
    x = tl.load(logits + places, mask=inside, other=-float("inf")).to(tl.float32)
    most = tl.max(x, 0)
    first = tl.min(tl.where(x == most, places, NP), 0)
    first = tl.minimum(first, N - 1)  # logits that are no numbers: any token will do
    scaled = (x - most) / tl.load(temperature).to(tl.float32)
    tl.store(token, tl.load(ids + first))
    tl.store(chance, -tl.log(tl.sum(tl.where(inside, tl.exp(scaled), 0.0), 0)).to(tl.float64))
