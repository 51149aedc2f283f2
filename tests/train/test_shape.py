"""One dial: what follows from the depth, and the values that a new model begins with."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from unspool.errors import SettingsError
from unspool.model.files.checkpoint import save_checkpoint
from unspool.model.weights import parameter_count
from unspool.train.learning.model_size import (
    ModelPlan,
    batch_tokens,
    batch_tokens_for_steps,
    config_like,
    micro_batch_tokens,
    new_model,
    rates_for,
)


def test_depth_12_is_about_gpt2_small():
    shape = ModelPlan.for_depth(12, 32768)
    config = shape.config
    assert (config.width, config.heads, config.kv_heads, config.head_width) == (768, 6, 3, 128)
    assert 100e6 < parameter_count(config) < 130e6
    assert shape.tokens == 20 * parameter_count(config)
    assert shape.batch_tokens == 2**19
    assert config.family == "qwen3" and config.qk_norm == "head" and config.gated and config.tied


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 8, 20, 64])
def test_every_depth_is_a_model(depth: int):
    config = ModelPlan.for_depth(depth, 4096).config
    assert config.layers == depth
    assert config.heads * config.head_width <= config.width
    assert config.heads % config.kv_heads == 0
    assert (
        rates_for(config).matrices < rates_for(ModelPlan.for_depth(1, 4096).config).matrices
        or depth == 1
    )


def test_what_is_said_stays():
    config = ModelPlan.for_depth(
        4, 300, width=96, heads=3, kv_heads=1, head_width=32, tied=False
    ).config
    assert (config.width, config.heads, config.kv_heads, config.tied) == (96, 3, 1, False)
    with pytest.raises(SettingsError, match="depth must be from 1 to 128, got 0"):
        ModelPlan.for_depth(0, 300)


def test_batches_grow_with_what_there_is_to_learn():
    assert batch_tokens(10**5) == 2**11
    assert batch_tokens(10**9) < batch_tokens(10**10)
    for steps in (3000, 5000):
        by_steps = batch_tokens_for_steps(steps)
        assert by_steps / 2 <= batch_tokens(steps * by_steps) <= by_steps * 2


def test_a_new_model_knows_nothing_and_transformers_agrees(tmp_path: Path):
    import transformers

    config = ModelPlan.for_depth(2, 300, context=64).config
    model = new_model(config, seed=3)
    tokens = torch.randint(0, 300, (1, 20))
    logits = model(tokens)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert entropy.min() > math.log(300) - 0.2
    for layer in model.layers:  # so that later layers do not begin as nothing
        layer.attention.out.weight.data.normal_(0, 0.1)
        layer.feed.down.weight.data.normal_(0, 0.1)
    save_checkpoint(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(theirs(tokens).logits, model(tokens), atol=1e-4)


def test_the_seed_decides_the_start():
    config = ModelPlan.for_depth(1, 300).config
    one, same, other = (new_model(config, seed).embed.weight for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_another_familys_shape_for_a_vocabulary_of_ones_own(tmp_path: Path):
    from helpers import tiny
    from unspool.model.files.checkpoint import open_checkpoint

    tiny.save("gemma3", tmp_path)
    theirs = open_checkpoint(tmp_path).config
    config = config_like(theirs, 300)
    assert (config.vocab_size, config.windows) == (300, theirs.windows)
    logits = new_model(config)(torch.randint(0, 300, (1, 9)))
    assert torch.isfinite(logits).all()


def test_a_gpu_takes_as_many_tokens_at_once_as_its_memory_holds():
    small, large = ModelPlan.for_depth(4, 300).config, ModelPlan.for_depth(24, 300).config
    roomy, narrow = 140 << 30, 24 << 30
    assert micro_batch_tokens(small, roomy) == 2**17  # and no more, however small the model is
    assert micro_batch_tokens(large, narrow) < micro_batch_tokens(large, roomy) < 2**17
    for config in (small, large):
        for memory in (roomy, narrow):
            held = micro_batch_tokens(config, memory) * config.layers * config.width * 48
            assert held <= max(memory // 6, 2**11 * config.layers * config.width * 48)
    assert micro_batch_tokens(large, 1 << 30) == 2**11  # no fewer: what does not fit then is said
    assert micro_batch_tokens(small, None) == micro_batch_tokens(large, None) == 4096
