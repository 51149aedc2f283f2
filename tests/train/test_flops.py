"""Arithmetic is counted as torch counts it, operation by operation."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers import tiny
from unspool.model.files.config_json import config_from_hf
from unspool.model.layers.transformer import Transformer
from unspool.train.learning.model_size import (
    attention_flops,
    compute_parameters,
    forward_flops,
    mfu,
    peak_flops,
    training_flops,
)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2", "gemma2-file", "llama-tied-bias"])
def test_as_torch_counts(family: str):
    config = config_from_hf(tiny.make(family).config.to_dict())
    model, length = Transformer(config), 7
    with FlopCounterMode(display=False) as counter:
        loss = model(torch.zeros(2, length, dtype=torch.long)).sum()
        forward = counter.get_total_flops()
        loss.backward()
    assert forward == 2 * length * forward_flops(config, length)
    assert counter.get_total_flops() == 2 * length * training_flops(config, length)


def test_experts_that_are_not_picked_cost_nothing():
    config = config_from_hf(tiny.make("mixtral").config.to_dict())
    dense = config_from_hf(tiny.make("llama").config.to_dict())
    router = config.layers * config.experts * config.width
    feed = config.layers * 3 * config.width * config.expert_width
    extra = router + (config.experts_per_token - 1) * feed
    assert compute_parameters(config) == compute_parameters(dense) + extra


def test_what_a_token_really_sees():
    config = config_from_hf(tiny.make("mistral").config.to_dict())  # a window of 7
    observed = [min(position + 1, 7) for position in range(20)]
    per_key = 4 * config.heads * config.head_width * config.layers
    assert attention_flops(config, 20, causal=True) == pytest.approx(per_key * sum(observed) / 20)
    assert attention_flops(config, 20) == per_key * 7


def test_share_of_the_peak():
    config = config_from_hf(tiny.make("qwen3").config.to_dict())
    peak = peak_flops("NVIDIA H200")
    assert peak == 989e12
    assert peak_flops("some processor") is None
    half = peak / training_flops(config, 64) / 2
    assert mfu(config, 64, half, peak) == pytest.approx(0.5)


def test_the_log_tells_the_share_where_the_peak_is_known(monkeypatch: pytest.MonkeyPatch):
    from helpers.tiny_training import tiny_trainer
    from unspool.train.running.events import StepLogged

    events: list[StepLogged] = []

    def listen(event: object) -> None:
        if isinstance(event, StepLogged):
            events.append(event)

    tiny_trainer(steps=1).run(listen)
    assert "mfu" not in events[-1].extra
    monkeypatch.setattr("unspool.train.running.loop.device_peak", lambda device: 1e12)
    first = tiny_trainer(steps=1)
    first.run(listen)
    expected = mfu(first.model.config, first.batches.length, events[-1].tokens_per_second, 1e12)
    assert events[-1].extra["mfu"] == pytest.approx(expected)
