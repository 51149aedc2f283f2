"""Losses and gradients of tuning are those of trl, on the same tiny model and the same batch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import tiny
from unspool.model.files.checkpoint import load_transformer, open_checkpoint, rules_for_hf
from unspool.model.files.tensor_mapping import write_weights
from unspool.train.data.batches import TrainingBatch
from unspool.train.data.prepared import EncodedDocument
from unspool.train.data.tokenizer import TokenizerSettings, save_tokenizer_files, train_bpe
from unspool.train.tuning.dpo import Dpo, PairBatch, log_probabilities, padded
from unspool.train.tuning.grpo import grpo_losses
from unspool.train.tuning.tune import answers_only

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")

PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13], [20, 21]]
CHOSEN = [[30, 31, 32, 2], [40, 2], [50, 51, 2]]
REJECTED = [[33, 2], [41, 42, 43, 44, 2], [52, 2]]


@pytest.fixture
def model(tmp_path: Path) -> tuple[Any, torch.nn.Module]:
    """In transformers and here."""
    reference_model = tiny.save("qwen3", tmp_path / "model")
    unspool_model = load_transformer(open_checkpoint(tmp_path / "model"))
    return reference_model, unspool_model.requires_grad_(True)


def quiet_vocabulary(folder: Path) -> Any:
    """A byte tokenizer: the texts here are tokens already, but trl needs a tokenizer."""
    from transformers import AutoTokenizer

    settings = TokenizerSettings(vocab_size=259)
    folder.mkdir()
    save_tokenizer_files(train_bpe([], settings), settings, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def options(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"), "use_cpu": True, "report_to": [], "bf16": False,
        "per_device_train_batch_size": 3, "gradient_checkpointing": False, "max_length": None,
    }  # fmt: skip


def row(prompt: list[int], answer: list[int]) -> EncodedDocument:
    ids = np.array([*prompt, *answer], np.uint32)
    return EncodedDocument(ids, np.arange(len(ids)) >= len(prompt), 0)


def assert_same_gradients(
    reference_model: Any, loss: torch.Tensor, unspool_model: Any, own_value: torch.Tensor
) -> None:
    assert own_value.item() == pytest.approx(loss.item(), rel=1e-4)
    loss.backward()
    own_value.backward()
    result = {name: item.grad for name, item in unspool_model.named_parameters()}
    named = write_weights(unspool_model.config, rules_for_hf(unspool_model.config), result)
    expected = {name: item.grad for name, item in reference_model.named_parameters()}
    for name, gradient in named.items():
        other = expected[name.replace("{p}", "model.")]
        assert (gradient - other).norm() <= 1e-3 * other.norm() + 1e-7, name


def test_tuning_on_answers_is_trls_sft(model: tuple[Any, Any], tmp_path: Path):
    import trl
    from datasets import Dataset

    reference_model, unspool_model = model
    rows = [
        {"input_ids": p + c, "labels": [-100] * len(p) + c}
        for p, c in zip(PROMPTS, CHOSEN, strict=True)
    ]
    trainer = trl.SFTTrainer(
        reference_model, args=trl.SFTConfig(**options(tmp_path)),
        train_dataset=Dataset.from_list(rows),
        processing_class=quiet_vocabulary(tmp_path / "vocabulary"),
    )  # fmt: skip
    reference_model.train()
    loss = trainer.compute_loss(reference_model, trainer.data_collator(rows))
    ids, loss_mask = padded([row(p, c) for p, c in zip(PROMPTS, CHOSEN, strict=True)])
    own_value = answers_only(unspool_model, TrainingBatch(ids, loss_mask), torch.Generator()).mean
    assert_same_gradients(reference_model, loss, unspool_model, own_value)


def test_dpo_is_trls_dpo(model: tuple[Any, Any], tmp_path: Path):
    """With smoothing, which trl has no name for: both ways round, in their shares."""
    import trl
    from datasets import Dataset

    reference_model, unspool_model = model
    before = tiny.make("qwen3")
    with torch.no_grad():  # what it was is not what it is, else every margin would be 0
        for parameter in before.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    before.save_pretrained(tmp_path / "before")
    reference = load_transformer(open_checkpoint(tmp_path / "before"))
    texts = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 3
    trainer = trl.DPOTrainer(
        reference_model, ref_model=before, train_dataset=Dataset.from_list(texts),
        args=trl.DPOConfig(**options(tmp_path), beta=0.3),
        processing_class=quiet_vocabulary(tmp_path / "vocabulary"),
    )  # fmt: skip
    reference_model.train()
    examples = [
        {"prompt_ids": p, "chosen_ids": c, "rejected_ids": r}
        for p, c, r in zip(PROMPTS, CHOSEN, REJECTED, strict=True)
    ]
    loss = trainer.compute_loss(reference_model, trainer.data_collator(examples))
    swapped = [
        {**item, "chosen_ids": item["rejected_ids"], "rejected_ids": item["chosen_ids"]}
        for item in examples
    ]
    loss = 0.9 * loss + 0.1 * trainer.compute_loss(reference_model, trainer.data_collator(swapped))
    pairs = zip(PROMPTS, CHOSEN, REJECTED, strict=True)
    ids, loss_mask = padded([row(p, answer) for p, c, r in pairs for answer in (c, r)])
    objective = Dpo(0.3, smoothing=0.1, reference=reference)
    report = objective(unspool_model, PairBatch(ids, loss_mask), torch.Generator())
    assert_same_gradients(reference_model, loss, unspool_model, report.mean)
    assert abs(report.extra["margin"]) > 1e-3


def test_grpo_is_trls_grpo(model: tuple[Any, Any], tmp_path: Path):
    """Answers that are some steps old, so that ratios differ from one and some are clipped; the
    loss of the paper, in which ratios do not weigh the KL term."""
    import trl
    from datasets import Dataset

    reference_model, unspool_model = model
    prompts, rng = [[5, 6, 7], [9, 10, 11]], torch.Generator().manual_seed(0)
    answers = [CHOSEN[0], REJECTED[1]]
    rows = [row(p, a) for p, a in zip(prompts, answers, strict=True)]
    ids, loss_mask = padded(rows)
    with torch.no_grad():
        now = log_probabilities(unspool_model, ids, loss_mask)
    before = (now + 0.5 * torch.randn(now.shape, generator=rng)) * loss_mask
    reference = (now + 0.5 * torch.randn(now.shape, generator=rng)) * loss_mask
    gains = torch.tensor([0.7, -0.7])

    settings = {**options(tmp_path), "per_device_train_batch_size": 2}
    del settings["max_length"]
    trainer = trl.GRPOTrainer(
        reference_model, reward_funcs=lambda completions, **report: [0.0] * len(completions),
        args=trl.GRPOConfig(
            **settings, loss_type="grpo", num_generations=2, use_bias_correction_kl=False
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 2),
        processing_class=quiet_vocabulary(tmp_path / "vocabulary"),
    )  # fmt: skip
    reference_model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.beta = 0.04  # said before, it would fetch a model to be compared with
    behind = slice(len(prompts[0]) - 1, None)  # the places whose targets are answers
    loss = trainer._compute_loss(reference_model, {
        "prompt_ids": torch.tensor(prompts), "prompt_mask": torch.ones(2, 3, dtype=torch.long),
        "completion_ids": ids[:, 3:], "completion_mask": loss_mask[:, behind].long(),
        "advantages": gains, "old_per_token_logps": before[:, behind],
        "ref_per_token_logps": reference[:, behind], "num_items_in_batch": loss_mask.sum(),
    })  # fmt: skip
    now = log_probabilities(unspool_model, ids, loss_mask)
    result = grpo_losses(now, before, gains, reference=reference, kl_weight=0.04)
    own_value = ((result * loss_mask).sum(1) / loss_mask.sum(1)).mean()
    assert_same_gradients(reference_model, loss, unspool_model, own_value)
