"""Models trained with an MTP layer: the loss is its formula, and what is drafted is often right."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import unspool
from helpers.mtp_support import random_model
from unspool.decoding.speculative.controller import DraftShape, FixedShape
from unspool.decoding.speculative.head_drafter import HeadDrafter
from unspool.decoding.speculative.mtp import load_mtp
from unspool.errors import SettingsError
from unspool.model.layers.transformer import RopeTables
from unspool.train.data.batches import TrainingBatch
from unspool.train.learning.forward import AttentionMask, hidden_states
from unspool.train.learning.objectives import NextTokenAndMtp, next_token
from unspool.train.pretrain import NewSettings, create_run, train

NOUNS = ("river", "engine", "letter", "garden", "teacher", "market", "window", "captain")
VERBS = ("crosses", "repairs", "reads", "paints", "follows", "opens", "remembers")


def sentences(count: int) -> str:
    """Simple English at random: half of its words are certain from those before."""
    rng = random.Random(1)
    lines = [
        f"The {rng.choice(NOUNS)} of the old town {rng.choice(VERBS)} the {rng.choice(NOUNS)} "
        f"every {rng.choice(('morning', 'evening'))} before the bells ring."
        for _ in range(count)
    ]
    return "\n\n".join(" ".join(lines[n : n + 8]) for n in range(0, count, 8))


class CountingDrafter(HeadDrafter):
    """Counts what all drafters together proposed, and what was accepted."""

    proposed = accepted = 0

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        CountingDrafter.proposed += proposed
        CountingDrafter.accepted += accepted
        return super().learn(proposed, accepted, seconds)


def a_batch(documents: bool) -> TrainingBatch:
    ids = torch.randint(0, 259, (2, 20), generator=torch.Generator().manual_seed(3))
    if not documents:
        return TrainingBatch(ids, None, None)
    numbers = torch.zeros(2, 19, dtype=torch.int32)
    numbers[1, 9:] = 1
    mask = torch.ones(2, 19, dtype=torch.bool)
    mask[0, :6] = False
    return TrainingBatch(ids, mask, numbers)


@pytest.mark.parametrize("documents", [False, True])
def test_the_loss_is_the_formula(documents: bool):
    model, batch = random_model("qwen3"), a_batch(documents)
    rng = torch.Generator()
    loss = NextTokenAndMtp(0.5)(model, batch, rng)
    losses: list[Any] = []
    spans = [(0, 0, 19), (1, 0, 9), (1, 9, 19)] if documents else [(0, 0, 19), (1, 0, 19)]
    for row, start, end in spans:
        ids = batch.ids[row : row + 1, start : end + 1]
        following = ids[:, 1:-1]
        x = hidden_states(model, ids[:, :-1], AttentionMask.build(model.config, ids[:, :-1]))
        positions = np.arange(start, start + following.shape[1])
        tables = (torch.from_numpy(t) for t in model.config.rotary.tables(positions, 20))  # type: ignore[union-attr]
        mask = AttentionMask.build(model.mtp.config, following)  # type: ignore[union-attr, arg-type]
        hidden = model.norm(x)[:, :-1]
        states = model.mtp(model.embed(following), hidden, RopeTables(*tables), mask)  # type: ignore[misc]
        token_losses = functional.cross_entropy(
            model.head_logits(states)[0], ids[0, 2:], reduction="none"
        )
        for at, value in enumerate(token_losses):
            if batch.loss_mask is None or batch.loss_mask[row, start + at + 1]:
                losses.append(value)
    expected = torch.stack(losses).mean().detach()
    assert loss.extra["mtp_loss"] == pytest.approx(float(expected), rel=1e-4)
    plain = next_token(model, batch, rng).mean
    assert torch.allclose(loss.mean, plain + 0.5 * expected, rtol=1e-4)
    loss.mean.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_cannot_be_trained_is_refused():
    for wrong in ({"mtp": -1.0}, {"mtp": 0.3, "objective": "masked"},
                  {"mtp": 0.3, "unlikelihood": 0.5}):  # fmt: skip
        with pytest.raises(SettingsError, match=r"mtp|MTP"):
            NewSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_trained_layer_drafts_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(sentences(2400))
    settings = NewSettings(
        data=(str(tmp_path / "text.txt"),), shape="llama", depth=2, width=64, vocab_size=300,
        length=64, batch_tokens=1024, steps=120, rate=2.0, mtp=0.3, device="cpu",
        sample_every=1000, save_every=1000, judge_every=1000,
    )  # fmt: skip
    run = create_run(settings, tmp_path / "run")
    train(run)
    lines = [line for line in run.log() if "mtp_loss" in line]
    assert lines[-1]["mtp_loss"] < 0.5 * lines[0]["mtp_loss"]
    with unspool.load(run.model, device="cpu", memory=16 << 20, progress=False) as lm:
        head = load_mtp(lm.path, lm.model, lm.context)
        for options, least in (({"temperature": 0.0}, 0.6), ({"temperature": 0.8, "seed": 1}, 0.4)):
            CountingDrafter.proposed = CountingDrafter.accepted = 0
            for prompt in ("The river of", "The teacher", "The old"):
                plain = lm.generate(prompt, max_tokens=60, end=False, **options)
                drafted = lm.generate(
                    prompt, max_tokens=60, end=False, **options,
                    speculate=lambda r: CountingDrafter(head, r, FixedShape(DraftShape(2))),
                )  # fmt: skip
                assert drafted.tokens == plain.tokens
            rate = CountingDrafter.accepted / CountingDrafter.proposed
            print(f"{options}: {rate:.0%} of {CountingDrafter.proposed} drafted tokens accepted")
            assert rate > least
