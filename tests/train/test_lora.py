"""LoRA, DPO and GRPO: against PEFT, against the papers' formulas, and on a model that learns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unspool
from helpers import tiny
from unspool.errors import SettingsError
from unspool.model.adapters import read_adapter, write_adapter
from unspool.model.files.checkpoint import load_transformer, open_checkpoint
from unspool.train.learning.lora import (
    LoraConfig,
    adapter_of,
    add_lora,
    load_adapter,
    lora_modules,
    merge,
    switch_lora,
)
from unspool.train.tuning.dpo import dpo_loss, log_probabilities
from unspool.train.tuning.grpo import advantages, grpo_losses

TOKENS = torch.tensor([[3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 26]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.save("llama", tmp_path / "base")
    return tmp_path


def transformer(folder: Path) -> Any:
    return load_transformer(open_checkpoint(folder / "base"))


def with_lora(folder: Path, **settings: Any) -> Any:
    model = transformer(folder)
    add_lora(model, LoraConfig(**{"rank": 4, **settings}))
    with torch.no_grad():
        for number, (_, module) in enumerate(lora_modules(model)):
            torch.manual_seed(number)
            module.up.normal_(std=0.1)
    return model


def test_it_begins_as_the_model_itself_and_trains_only_what_was_added(folder: Path) -> None:
    plain, model = transformer(folder), transformer(folder)
    add_lora(model, LoraConfig(rank=4))
    torch.testing.assert_close(model(TOKENS), plain(TOKENS), rtol=0, atol=0)
    trained = [name for name, item in model.named_parameters() if item.requires_grad]
    assert trained and all(name.endswith((".down", ".up")) for name in trained)
    few = transformer(folder)
    add_lora(few, LoraConfig(rank=4, layers=1, targets=("q",)))
    assert [name for name, _ in lora_modules(few)] == ["layers.3.attention.q.weight"]
    again = transformer(folder)
    add_lora(again, LoraConfig(rank=4))  # the same seed, the same numbers
    for (_, first), (_, other) in zip(lora_modules(model), lora_modules(again), strict=True):
        torch.testing.assert_close(first.down, other.down, rtol=0, atol=0)


def test_what_was_trained_gives_pefts_logits_ours_and_those_of_the_merged_model(
    folder: Path,
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    model = with_lora(folder, alpha=10)
    with torch.no_grad():
        expected = model(TOKENS)
    write_adapter(adapter_of(model), folder / "adapter", model.config)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    theirs = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, expected, rtol=0, atol=1e-4)
    merged = transformer(folder)
    merge(merged, read_adapter(folder / "adapter", merged.config))
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS), expected, rtol=0, atol=1e-4)
    lm = unspool.load(folder / "base", backend="torch")
    lm.load_adapter("a", folder / "adapter")
    with lm.open_branch(TOKENS[0].tolist(), "a") as branch:
        served = np.asarray(lm.engine.extend(branch, num_logits=TOKENS.shape[1]))
    np.testing.assert_allclose(served, expected[0].numpy(), atol=1e-4)


def test_it_can_be_switched_off_and_gone_on_with(folder: Path) -> None:
    plain, model = transformer(folder), with_lora(folder)
    with torch.no_grad():
        on = model(TOKENS)
        switch_lora(model, False)
        torch.testing.assert_close(model(TOKENS), plain(TOKENS), rtol=0, atol=0)
        again = transformer(folder)
        add_lora(again, LoraConfig(rank=4, alpha=1))  # another scale, the same product
        load_adapter(again, adapter_of(model))
        torch.testing.assert_close(again(TOKENS), on, rtol=0, atol=1e-5)
    other = transformer(folder)
    add_lora(other, LoraConfig(rank=5))
    with pytest.raises(SettingsError, match="another rank"):
        load_adapter(other, adapter_of(model))


def test_what_lora_cannot_be_is_refused() -> None:
    with pytest.raises(SettingsError, match="choose from"):
        LoraConfig(targets=("q", "embed"))
    with pytest.raises(SettingsError, match="rank"):
        LoraConfig(rank=0)


def test_dpo_is_the_papers_formula() -> None:
    sums = torch.tensor([[-12.0, -15.0, -13.0, -14.0], [-3.0, -2.5, -3.5, -2.0]]).T
    arguments = [sums[n] for n in range(4)]
    losses, margin = dpo_loss(*arguments, beta=0.3)
    for row in range(2):
        selected, rejected, chosen_before, rejected_before = (
            float(item[row]) for item in arguments
        )
        output = 0.3 * ((selected - chosen_before) - (rejected - rejected_before))
        assert float(margin[row]) == pytest.approx(output, rel=1e-6)
        assert float(losses[row]) == pytest.approx(math.log(1 + math.exp(-output)), rel=1e-6)
    smoothed, _ = dpo_loss(*arguments, beta=0.3, smoothing=0.1)
    complementary_copies, _ = dpo_loss(
        arguments[1], arguments[0], arguments[3], arguments[2], beta=0.3
    )
    torch.testing.assert_close(smoothed, 0.9 * losses + 0.1 * complementary_copies)


def test_log_probabilities_are_those_of_the_logits(folder: Path) -> None:
    model = transformer(folder)
    loss_mask = torch.zeros(1, TOKENS.shape[1] - 1, dtype=torch.bool)
    loss_mask[0, 4:8] = True
    result = log_probabilities(model, TOKENS, loss_mask)
    expected = model(TOKENS[:, :-1]).log_softmax(-1).gather(2, TOKENS[:, 1:, None])[..., 0]
    torch.testing.assert_close(result, expected * loss_mask, rtol=0, atol=1e-4)


def test_advantages_are_deviations_of_the_group() -> None:
    result = advantages(torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    assert result[0].tolist() == pytest.approx([-0.866, 0.866, 0.866, -0.866], abs=1e-3)
    assert result[1].tolist() == [0, 0, 0, 0]  # nothing to learn where all are alike


def test_grpo_is_the_papers_formula() -> None:
    now = torch.tensor([[-1.0, -2.0], [-1.0, -0.1]], requires_grad=True)
    before, reference = torch.tensor([[-1.1, -1.0], [-2.0, -0.2]]), torch.full((2, 2), -1.5)
    gain = torch.tensor([0.7, -1.3])
    losses = grpo_losses(now, before, gain, low=0.2, high=0.3, reference=reference, kl_weight=0.4)
    for row in range(2):
        for place in range(2):
            p, old, ref = (math.exp(float(t[row, place])) for t in (now, before, reference))
            ratio, worth = p / old, float(gain[row])
            bounded = min(max(ratio, 0.8), 1.3)
            kl = ref / p - math.log(ref / p) - 1
            output = -min(ratio * worth, bounded * worth) + 0.4 * kl
            assert float(losses[row, place]) == pytest.approx(output, rel=1e-5)
    plain = grpo_losses(now, before, gain, low=0.2, high=0.3)
    plain.sum().backward()
    assert now.grad is not None
    assert now.grad[1, 0] != 0 and float(now.grad[0, 1]) != 0
    # A token that has become likelier than allowed gains nothing more.
    far = torch.tensor([[0.0]], requires_grad=True)
    grpo_losses(far, torch.tensor([[-1.0]]), torch.tensor([1.0])).sum().backward()
    assert far.grad is not None and float(far.grad) == 0
