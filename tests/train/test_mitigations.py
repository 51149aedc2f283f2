"""Scheduled sampling and unlikelihood against their formulas, written out token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from helpers.tiny_training import Batch, CountingBatches, tiny_model
from unspool.errors import SettingsError
from unspool.model.layers.transformer import Transformer
from unspool.train.learning import objectives
from unspool.train.learning.objectives import MitigatedNextToken, next_token
from unspool.train.learning.optimizers import Rates, make_optimizers
from unspool.train.pretrain import NewSettings
from unspool.train.running.loop import Trainer, TrainSettings


def ids(rows: int = 2, length: int = 15, tokens: int = 6) -> Tensor:
    """Few different tokens, so that many occur again."""
    return torch.randint(0, tokens, (rows, length), generator=torch.Generator().manual_seed(3))


def run(objective: Any, batch: Batch) -> tuple[Transformer, Any]:
    model = tiny_model().requires_grad_(True)
    with torch.no_grad():  # a model as unsure as one that has learned something
        model.embed.weight.mul_(0.2)
    return model, objective(model, batch, torch.Generator().manual_seed(1))


def by_hand(model: Transformer, batch: Batch) -> tuple[Tensor, Tensor]:
    """The losses of all counted targets and of all that occurred before them, as in the paper."""
    likelihood, repeated = torch.tensor(0.0), torch.tensor(0.0)
    for row, tokens in enumerate(batch.ids):
        for place in range(len(tokens) - 1):
            if batch.loss_mask is not None and not batch.loss_mask[row, place]:
                continue
            first = 0
            if batch.document_ids is not None:
                documents = batch.document_ids[row].tolist()
                first = documents.index(documents[place])
            shares = model(tokens[None, first : place + 1])[0, -1].softmax(-1)
            target = int(tokens[place + 1])
            likelihood = likelihood - shares[target].log()
            for token in {*tokens[first : place + 1].tolist()} - {target}:
                repeated = repeated - (1 - shares[token]).log()
    return likelihood, repeated


@pytest.mark.parametrize("limited", [False, True])
def test_unlikelihood_is_the_formula_with_its_gradients(limited: bool):
    batch = Batch(ids())
    if limited:
        batch.loss_mask = torch.arange(14).remainder(3).bool().expand(2, -1)
        batch.document_ids = torch.tensor([[0] * 6 + [1] * 8, [0] * 9 + [1] * 5])
    model, loss = run(MitigatedNextToken(unlikelihood=0.5), batch)
    likelihood, repeated = by_hand(model, batch)
    count = 28 if batch.loss_mask is None else int(batch.loss_mask.sum())
    expected = (likelihood + 0.5 * repeated) / count
    assert int(loss.tokens) == count
    assert torch.allclose(loss.mean, expected, rtol=1e-4)
    assert loss.extra["unlikelihood"] == pytest.approx(float(repeated) / count, rel=1e-4)
    parameters = list(model.parameters())
    result = torch.autograd.grad(loss.mean, parameters)
    for first, other in zip(result, torch.autograd.grad(expected, parameters), strict=True):
        assert torch.allclose(first, other, atol=1e-5)


def test_scheduled_sampling_reads_its_own_tokens_and_learns_the_texts(
    monkeypatch: pytest.MonkeyPatch,
):
    batch = Batch(ids(4, 41, 29))
    read: list[Tensor] = []
    usual = objectives.hidden_states
    monkeypatch.setattr(
        objectives,
        "hidden_states",
        lambda model, tokens, sight: (read.append(tokens), usual(model, tokens, sight))[1],
    )
    model, loss = run(MitigatedNextToken(scheduled_sampling=0.5), batch)
    first, second = read
    assert torch.equal(first, batch.ids[:, :-1]) and torch.equal(first[:, 0], second[:, 0])
    changed = (first != second).float().mean()
    assert 0.35 < changed < 0.6, "half, less those drawn as they stood"
    logits = model(second)
    expected = functional.cross_entropy(logits.flatten(0, 1), batch.ids[:, 1:].flatten())
    assert torch.allclose(loss.mean, expected, rtol=1e-4)
    assert loss.mean.requires_grad


def test_what_is_drawn_has_the_models_chances():
    model = tiny_model()
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(2))
    shares = model.logits(x).float().softmax(-1)[0]
    chances = (torch.arange(20_000) + 0.5) / 20_000
    drawn = objectives._sample_tokens(model, x.expand(20_000, -1), chances)
    counts = torch.bincount(drawn, minlength=29) / 20_000
    assert torch.allclose(counts, shares, atol=2e-4)


def test_what_the_model_never_writes_is_never_replaced():
    loss_mask = torch.zeros(4, 20, dtype=torch.bool)
    loss_mask[:, 10:] = True  # the targets from token 11 on
    documents = torch.tensor([[0] * 14 + [1] * 6] * 4)
    batch: Any = Batch(ids(4, 21, 29), loss_mask, documents)
    model = tiny_model()
    sight = objectives.AttentionMask.build(model.config, batch.ids[:, :-1])
    mixed = objectives._replace_tokens(model, batch, sight, 1.0, torch.Generator().manual_seed(0))
    is_same = mixed == batch.ids[:, :-1]
    assert is_same[:, :11].all() and is_same[:, 14].all() and not is_same[:, 11:].all()


def test_off_it_is_next_token_training_and_the_share_grows():
    batch = Batch(ids())
    _, plain = run(next_token, batch)
    _, off = run(MitigatedNextToken(), batch)
    _, early = run(MitigatedNextToken(scheduled_sampling=1.0, progress=0.0), batch)
    assert torch.equal(plain.mean, off.mean) and torch.equal(plain.mean, early.mean)

    objective, observed = MitigatedNextToken(scheduled_sampling=0.5), list[float]()

    model = tiny_model().requires_grad_(True)
    optimizers = make_optimizers(model, Rates(1e-3, 1e-3, 1e-3, 1e-3), "adamw")
    trainer = Trainer(model, CountingBatches(), objective, optimizers, TrainSettings(steps=4))
    trainer.run(lambda event: observed.append(objective.progress))
    assert {0.0, 0.25, 0.5, 0.75} <= set(observed)


def test_what_cannot_be_is_refused():
    for wrong in ({"scheduled_sampling": 1.5}, {"unlikelihood": -1}, {"unlikelihood": math.nan}):
        with pytest.raises(SettingsError, match=r"scheduled_sampling|unlikelihood"):
            NewSettings(**wrong)
    with pytest.raises(SettingsError, match="next_token"):
        NewSettings(unlikelihood=1.0, objective="masked")
