"""Routed feed-forwards against the plain transformer's, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.backends.cuda import runner as module
from unspool.backends.cuda.runner import ExpertScratch, run_experts
from unspool.backends.cuda.weights import ExpertWeights, Weights, fuse_weights
from unspool.model.config import ModelConfig
from unspool.model.layers.parts import Experts
from unspool.model.layers.transformer import Transformer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_experts(
    count: int = 6, top_k: int = 2, width: int = 48, inner: int = 40, normalize: bool = True,
    activation: str = "silu", dtype: torch.dtype = torch.float32,
) -> tuple[Experts, ExpertWeights, Weights]:  # fmt: skip
    config = ModelConfig(
        family="test", vocab_size=8, width=width, layers=1, heads=1, kv_heads=1, head_width=8,
        ff_width=8, context=8, positions="none", experts=count, experts_per_token=top_k,
        expert_width=inner, normalize_experts=normalize, activation=activation,  # type: ignore[arg-type]
    )  # fmt: skip
    torch.manual_seed(count)
    model = Transformer(config).to(DEVICE, dtype).requires_grad_(False)
    weights, feed = fuse_weights(model), model.layers[0].feed
    expert_weights = weights.layers[0].experts
    assert expert_weights is not None and isinstance(feed, Experts)
    return feed, expert_weights, weights


def run(
    x: torch.Tensor, expert_weights: ExpertWeights, weights: Weights, exact: bool = False
) -> torch.Tensor:
    scratch = ExpertScratch.for_tokens(len(x) + 3, weights.config, weights)
    out = torch.full_like(x, torch.nan)
    for _ in range(2):  # it leaves its scratch as it found it
        run_experts(x, expert_weights, weights.config, out, scratch, pdl=False, exact=exact)
    assert not scratch.counts.any()
    return out


@given(
    tokens=st.integers(1, 9),
    count=st.integers(1, 9),
    top_k=st.integers(1, 3),
    width=st.sampled_from((16, 40, 48)),
    inner=st.sampled_from((8, 33, 64)),
    normalize=st.booleans(),
    activation=st.sampled_from(("silu", "gelu", "relu")),
)
@settings(max_examples=3, deadline=None)
def test_as_the_plain_transformer(
    tokens: int, count: int, top_k: int, width: int, inner: int, normalize: bool, activation: str
):
    feed, expert_weights, weights = make_experts(
        count, min(top_k, count), width, inner, normalize, activation
    )
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(tokens)).to(DEVICE)
    torch.testing.assert_close(
        run(x, expert_weights, weights), feed(x[None])[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("tokens", (3, pytest.param(150, marks=pytest.mark.slow)))
def test_narrow_numbers_few_and_many(tokens: int):
    """In 16 bits, where blocks grow with the number of tokens."""
    feed, expert_weights, weights = make_experts(dtype=torch.float16)
    x = torch.randn(tokens, 48, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    torch.testing.assert_close(
        run(x, expert_weights, weights), feed(x[None])[0], rtol=0.02, atol=0.02
    )


@pytest.mark.slow
def test_the_same_bits_for_any_number_of_tokens():
    _, expert_weights, weights = make_experts(4, 2)
    x = torch.randn(150, 48, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    together = run(x, expert_weights, weights, exact=True)
    for n in (0, 70, 149):
        assert torch.equal(run(x[n : n + 1], expert_weights, weights, exact=True)[0], together[n])


def test_all_tokens_may_choose_the_same_experts():
    _, expert_weights, weights = make_experts(5, 2)
    expert_weights.router.zero_()  # of equals the first
    x = torch.randn(20, 48, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    scratch = ExpertScratch.for_tokens(20, weights.config, weights)
    run_experts(x, expert_weights, weights.config, torch.empty_like(x), scratch, pdl=False)
    assert scratch.expert_ids.tolist() == [[0, 1]] * 20
    assert int(scratch.total) == 2 * -(-20 // module.SMALL_BLOCK)
