"""Muon against torch's own, the groups, the schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.tiny_training import tiny_model
from unspool.train.learning.optimizers import (
    Muon,
    Rates,
    Schedule,
    make_optimizers,
    orthogonal,
    parameter_groups,
)


def newton_schulz_in_float32(grad: Any, coefficients: Any, steps: int, eps: float) -> Any:
    """What torch's Muon does in bfloat16, which would hide everything behind its rounding."""
    a, b, c = coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


def test_muon_is_torchs_muon(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", newton_schulz_in_float32)
    rng = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=rng) for shape in ((8, 12), (12, 8), (8, 12), (5, 5))]
    theirs, ours = ([torch.nn.Parameter(item.clone()) for item in start] for _ in range(2))
    expected = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    result = Muon(ours, lr=0.02, weight_decay=0.1)
    for _ in range(4):
        for first, other in zip(theirs, ours, strict=True):
            first.grad = torch.randn(first.shape, generator=rng)
            other.grad = first.grad.clone()
        expected.step()
        result.step()
    for first, other in zip(theirs, ours, strict=True):
        assert torch.allclose(first, other, atol=1e-5)


def test_orthogonal_brings_singular_values_near_one():
    matrices = torch.randn(3, 6, 10, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrices))
    assert values.min() > 0.5 and values.max() < 1.3
    assert torch.allclose(orthogonal(matrices[1:2])[0], orthogonal(matrices)[1], atol=1e-5)
    experts = orthogonal(matrices[None])  # a stack of stacks
    assert experts.shape == (1, 3, 6, 10)


def test_every_weight_has_its_optimizer():
    model = tiny_model(tied=False)
    groups = parameter_groups(model)
    assert [id(item) for item in groups["embedding"]] == [id(model.embed.weight)]
    assert model.head is not None
    assert [id(item) for item in groups["head"]] == [id(model.head.weight)]
    assert len(groups["matrices"]) == 2 * 7
    assert sum(map(len, groups.values())) == len(list(model.parameters()))
    for kind, count in (("muon", 2), ("adamw", 1)):
        optimizers = make_optimizers(model, Rates(), kind)  # type: ignore[arg-type]
        assert len(optimizers) == count
        held_open = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        assert len(held_open) == len(list(model.parameters()))
    model.embed.requires_grad_(False)
    assert parameter_groups(model)["embedding"] == []


def test_warm_up_constant_decay():
    share = Schedule(steps=10, warmup=3, decay=0.4)
    assert [round(share(step), 3) for step in range(10)] == [
        0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25,
    ]  # fmt: skip
    assert Schedule(steps=5, decay=0.0)(3) == 1
    assert Schedule(steps=10, decay=1.0, floor=0.1)(9) == pytest.approx(0.19)
