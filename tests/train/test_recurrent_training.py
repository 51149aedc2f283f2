"""The trainer's way through recurrent layers: chunks give what single tokens give, no document
knows of another, and what is learned is learned through the state."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from helpers import tiny
from helpers.paged_texts import config
from helpers.recurrent_texts import SHAPES
from unspool.model.files.checkpoint import (
    load_transformer,
    open_checkpoint,
    rules_for_hf,
    save_checkpoint,
)
from unspool.model.files.tensor_mapping import write_weights
from unspool.train.data.batches import TrainingBatch
from unspool.train.learning.forward import AttentionMask, causal_within_documents, hidden_states
from unspool.train.learning.model_size import new_model, rates_for
from unspool.train.learning.objectives import next_token
from unspool.train.learning.optimizers import make_optimizers, parameter_groups


def model_of(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = new_model(config(layers=3, **SHAPES[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # also those that begin at zero
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


def some_tokens(rows: int, count: int) -> torch.Tensor:
    return torch.randint(0, 67, (rows, count), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["conv", "delta", "tiled", "mamba2", "halves"])
def test_chunks_give_what_single_tokens_give(name: str):
    model, tokens = model_of(name), some_tokens(2, 150)  # three chunks, the last not full
    with torch.no_grad():
        chunks = model.logits(
            hidden_states(model, tokens, AttentionMask.build(model.config, tokens))
        )
        assert (chunks - model(tokens)).abs().max() < 1e-3 and chunks.std() > 0.1


@pytest.mark.parametrize("name", ["conv", "delta", "mamba2"])
def test_in_16_bits_it_learns_nearly_the_same(name: str):
    """As on a GPU, where products are made in bfloat16 and the weights stay in 32 bits."""
    gradients = []
    for bits in (32, 16):
        model = model_of(name)
        with torch.autocast("cpu", torch.bfloat16, enabled=bits == 16):
            loss = next_token(model, TrainingBatch(some_tokens(2, 80)), torch.Generator()).mean
        loss.backward()
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        gradients.append(torch.cat([named[n].flatten() for n in sorted(named)]))
    exact, rounded = gradients
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.99
    assert not torch.equal(exact, rounded)


@pytest.mark.parametrize("name", ["conv", "delta", "mamba2"])
def test_no_document_knows_of_another(name: str):
    model, tokens = model_of(name), some_tokens(1, 150)
    lengths = [3, 1, 60, 70, 16]  # one ends inside a chunk, another goes over a border
    documents = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))[None]
    sight = AttentionMask.build(model.config, tokens, causal_within_documents(documents), documents)
    # The same positions, alone: only what lies before it may differ.
    starts = np.concatenate(([0], np.cumsum(lengths)))
    with torch.no_grad():
        together = hidden_states(model, tokens, sight)
        changed = tokens.clone()
        for first, end in pairwise(starts.tolist()):
            changed[0, :first] = (tokens[0, :first] + 1) % 67
            alone = hidden_states(model, changed, sight)
            assert (alone[0, first:end] - together[0, first:end]).abs().max() < 1e-4
            changed = tokens.clone()


@pytest.mark.parametrize(
    "name", ["conv", *(pytest.param(more, marks=pytest.mark.slow) for more in ("delta", "mamba2"))]
)
def test_it_learns_to_repeat_what_lies_further_back(name: str, tmp_path):
    """Period 3 is out of sight of a token itself: the convolution or the state must carry it."""
    torch.manual_seed(0)
    model = new_model(config(layers=2, **{**SHAPES[name], "mixers": (name, name)}))
    assert not any("conv.weight" in n for n in _names(model, "matrices"))
    chosen = make_optimizers(model, rates_for(model.config))
    rng, losses = torch.Generator().manual_seed(0), []
    for _ in range(80):
        start = torch.randint(0, 8, (16, 3), generator=rng)
        batch = TrainingBatch(start.repeat(1, 8), None, None)
        loss = next_token(model, batch, rng)
        loss.mean.backward()
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.mean.item())
    assert losses[-1] < 1.2, "a model that knows no order comes to ln 8 = 2.08"
    save_checkpoint(model, tmp_path)
    again = load_transformer(open_checkpoint(tmp_path))
    tokens = some_tokens(1, 20)
    with torch.no_grad():
        assert torch.equal(again(tokens), model.eval()(tokens))


def _names(model: torch.nn.Module, group: str) -> list[str]:
    found = {id(parameter) for parameter in parameter_groups(model)[group]}
    return [name for name, parameter in model.named_parameters() if id(parameter) in found]


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()))
    return {name: each for (name, _), each in zip(model.named_parameters(), found, strict=True)}


def assert_alike(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Relative error of each tensor at most 0.001."""
    assert found.keys() == wanted.keys()
    for name, one in found.items():
        apart = (one.reshape(-1) - wanted[name].reshape(-1)).norm()
        assert apart <= 1e-3 * wanted[name].norm() + 1e-6, name


@pytest.mark.parametrize("name", ["conv", "delta", "tiled"])
def test_gradients_are_those_of_the_plain_recurrence(name: str):
    """Backward through chunks, and through one token after the other."""
    model, tokens = model_of(name), some_tokens(2, 80)
    chunks = next_token(model, TrainingBatch(tokens, None, None), torch.Generator()).mean
    logits = model(tokens[:, :-1])
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert torch.allclose(chunks, plain, rtol=1e-4)
    assert_alike(gradients(model, chunks), gradients(model, plain))


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "qwen3-next"])
def test_gradients_are_those_of_transformers(name: str, tmp_path):
    theirs = tiny.save(name, tmp_path)
    model = load_transformer(open_checkpoint(tmp_path)).requires_grad_(True)
    tokens = torch.randint(3, 259, (2, 70), generator=torch.Generator().manual_seed(1))
    loss = next_token(model, TrainingBatch(tokens, None, None), torch.Generator()).mean
    wanted = theirs(tokens, labels=tokens).loss
    assert torch.allclose(loss, wanted, rtol=1e-4)
    # A gradient has the layout of its weight, so the rules for weights name it as they do.
    named = write_weights(model.config, rules_for_hf(model.config), gradients(model, loss))
    found = {key.replace("{p}", "model."): value for key, value in named.items()}
    expected = gradients(theirs, wanted)
    for each in (found, expected):  # files call what is in experts otherwise than the module does
        for key in [key for key in each if ".experts." in key]:
            del each[key]
    assert_alike(found, expected)
