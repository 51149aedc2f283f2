"""Masked and block-diffusion objectives against plain loops that say what they mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from helpers.tiny_training import Batch, tiny_model
from unspool.model.layers.transformer import Transformer, attention_weights
from unspool.train.learning import objectives
from unspool.train.learning.forward import AttentionMask, hidden_states
from unspool.train.learning.objectives import BlockDiffusion, Masked, block_diffusion_mask

MASK = 28


def ids(rows: int = 2, length: int = 21) -> Tensor:
    return torch.randint(0, MASK, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """What an objective drew: how much to hide, and which tokens."""
    observed: dict[str, Tensor] = {}
    shares, hide = objectives._mask_ratios, objectives._draw_mask

    def watch_shares(*arguments: Any) -> Tensor:
        observed["share"] = shares(*arguments)
        return observed["share"]

    def watch_hide(*arguments: Any) -> Tensor:
        observed["hide"] = hide(*arguments)
        return observed["hide"]

    monkeypatch.setattr(objectives, "_mask_ratios", watch_shares)
    monkeypatch.setattr(objectives, "_draw_mask", watch_hide)
    return observed


def looking(model: Transformer, tokens: Tensor, positions: list[int], ends: list[int]) -> Tensor:
    """Vectors of one row by the specification's own weights: token i sees those before ends[i]."""
    where = torch.tensor(positions)
    angles = model.rope_tables(where.numpy(), max(positions) + 1)
    x = model.embed(tokens)[None]
    for layer, turned in zip(model.layers, angles, strict=True):

        def attend(attention: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            order, visible = torch.arange(len(tokens)), torch.tensor(ends)
            weights = attention_weights(attention.config, 0, query, key, order, order, visible)
            return weights @ value.repeat_interleave(2, 1)

        x = layer(x, turned, None, attend)
    return x[0]


def surprise(model: Transformer, x: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model.logits(x), targets, reduction="none")


def run(objective: Any, batch: Batch) -> tuple[Transformer, Any]:
    model = tiny_model().requires_grad_(True)
    return model, objective(model, batch, torch.Generator().manual_seed(1))


def test_masked_is_the_bound_of_masked_diffusion(drawn: dict[str, Tensor]):
    batch = Batch(ids())
    model, loss = run(Masked(MASK), batch)
    share, hide, tokens = drawn["share"], drawn["hide"], batch.ids[:, :-1]
    total = torch.tensor(0.0)
    for row in range(2):
        noisy = tokens[row].masked_fill(hide[row], MASK)
        x = looking(model, noisy, list(range(20)), [20] * 20)
        guessed = surprise(model, x, tokens[row])
        total += (guessed[hide[row]] / share[row]).sum()
    assert torch.allclose(loss.mean, total / 40, rtol=1e-4)
    assert int(loss.tokens) == 40
    loss.mean.backward()
    assert model.embed.weight.grad is not None


def test_plain_weighting_counts_every_guess_alike(drawn: dict[str, Tensor]):
    batch = Batch(ids())
    model, loss = run(Masked(MASK, weighting="plain"), batch)
    hide, tokens = drawn["hide"], batch.ids[:, :-1]
    total = torch.tensor(0.0)
    for row in range(2):
        x = looking(model, tokens[row].masked_fill(hide[row], MASK), list(range(20)), [20] * 20)
        total += surprise(model, x, tokens[row])[hide[row]].sum()
    assert torch.allclose(loss.mean, total / hide.sum(), rtol=1e-4)
    assert int(loss.tokens) == int(hide.sum())


def test_masked_hides_only_what_counts(drawn: dict[str, Tensor]):
    loss_mask = torch.zeros(2, 20, dtype=torch.bool)
    loss_mask[:, 10:] = True  # the targets from token 11 on
    model = tiny_model()
    observed: list[Tensor] = []
    embed = model.embed.forward
    model.embed.forward = lambda tokens: (observed.append(tokens), embed(tokens))[1]  # type: ignore[method-assign]
    loss = Masked(MASK)(model, Batch(ids(), loss_mask), torch.Generator().manual_seed(1))
    assert int(loss.tokens) == 2 * 9
    assert torch.equal(observed[0][:, :11], ids()[:, :11])
    assert (observed[0][:, 11:] == MASK).any()


def test_block_diffusion_is_a_block_behind_clean_text(drawn: dict[str, Tensor]):
    """Each noisy block, alone behind its clean past, gives the vectors of the joint pass."""
    batch, block = Batch(ids()), 8
    model, loss = run(BlockDiffusion(MASK, block), batch)
    share, hide, tokens = drawn["share"], drawn["hide"], batch.ids[:, :-1]
    total = torch.tensor(0.0)
    for row in range(2):
        for start in range(0, 20, block):
            end = min(20, start + block)
            noisy = tokens[row, start:end].masked_fill(hide[row, start:end], MASK)
            both = torch.cat((tokens[row, :start], noisy))
            ends = [*range(1, start + 1), *[end] * (end - start)]
            x = looking(model, both, list(range(end)), ends)[start:]
            guessed = surprise(model, x, tokens[row, start:end])
            total += guessed[hide[row, start:end]].sum() / share[row, start // block]
    assert torch.allclose(loss.mean, total / 40, rtol=1e-4)


def test_the_clean_half_is_the_causal_model():
    """So what a finished block leaves behind is what a causal model would have left."""
    model, tokens = tiny_model(), ids()[:, :20]
    allowed = block_diffusion_mask(20, 8, None)
    both = torch.cat((tokens, torch.full_like(tokens, MASK)), 1)
    attention = AttentionMask.build(model.config, both, allowed)
    x = hidden_states(model, both, attention, np.tile(np.arange(20), 2))
    assert torch.allclose(model.logits(x[:, :20]), model(tokens), atol=1e-4)


def test_shifted_block_diffusion_begins_each_block_with_the_causal_guess(
    drawn: dict[str, Tensor],
):
    batch = Batch(ids())
    objective = BlockDiffusion(MASK, 4, shifted=True, weighting="plain")
    model, loss = run(objective, batch)
    hide, tokens = drawn["hide"], batch.ids[:, :-1]
    causal = model(tokens)
    total, count = torch.tensor(0.0), 0
    for row in range(2):
        for place in hide[row].nonzero().flatten().tolist():
            start = place // 4 * 4
            if place == start and place:
                guess = causal[row, place - 1]
            else:
                here = slice(start, start + 4)
                noisy = tokens[row, here].masked_fill(hide[row, here], MASK)
                ends = [*range(1, start + 1), *[start + 4] * 4]
                both = torch.cat((tokens[row, :start], noisy))
                x = looking(model, both, list(range(start + 4)), ends)
                guess = model.logits(x[max(place - 1, 0)])
            total += functional.cross_entropy(guess, tokens[row, place])
            count += 1
    assert torch.allclose(loss.mean, total / count, rtol=1e-4)
    assert int(loss.tokens) == count


def test_shares_are_spread_evenly():
    shares = objectives._mask_ratios(8, 4, torch.Generator().manual_seed(0), torch.device("cpu"))
    ordered = shares.flatten().sort().values
    assert shares.shape == (8, 4)
    assert ordered[0] > 0
    assert (ordered.diff() - 1 / 32).abs().max() < 1e-3
