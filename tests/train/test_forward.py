"""The forward pass of training computes what the specification computes, for every family."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from helpers import tiny
from helpers.paged_texts import config
from helpers.recurrent_texts import SHAPES
from helpers.tiny_training import Batch, tiny_model
from unspool.model.files.checkpoint import (
    load_transformer,
    open_checkpoint,
    rules_for_hf,
    save_checkpoint,
)
from unspool.model.files.tensor_mapping import write_weights
from unspool.model.layers.transformer import Transformer
from unspool.train.data.batches import TrainingBatch
from unspool.train.learning.forward import (
    AttentionMask,
    causal_within_documents,
    hidden_states,
    recompute_activations,
)
from unspool.train.learning.model_size import new_config, new_model, rates_for
from unspool.train.learning.objectives import next_token, summed_loss, token_losses
from unspool.train.learning.optimizers import make_optimizers, parameter_groups


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def random_ids(rows: int, length: int, vocabulary: int = 29) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=rng())


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.NEWEST])
def test_every_family_forward_as_it_runs(family: str, tmp_path: Path):
    tiny.save(family, tmp_path)
    model = load_transformer(open_checkpoint(tmp_path))
    tokens = random_ids(2, 40, 259)
    x = hidden_states(model, tokens, AttentionMask.build(model.config, tokens))
    assert torch.allclose(model.logits(x), model(tokens), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2", "mixtral", "conv", "delta", "tiled"])
def test_gradients_are_those_of_the_plain_loss(name: str, tmp_path: Path):
    """The chunked loss against torch's own over all logits, through the specification; of recurrent
    layers backward through chunks, and through one token after the other."""
    if name in SHAPES:
        model = model_of(name)
    else:
        tiny.save(name, tmp_path)
        model = load_transformer(open_checkpoint(tmp_path)).requires_grad_(True)
    batch = Batch(random_ids(2, 80, 67), torch.rand(2, 79, generator=rng()) < 0.6)
    loss = next_token(model, batch, rng()).mean
    logits, targets = model(batch.ids[:, :-1]), batch.ids[:, 1:]
    plain = functional.cross_entropy(logits[batch.loss_mask], targets[batch.loss_mask])
    assert torch.allclose(loss, plain, rtol=1e-4)
    assert_alike(gradients(model, loss), gradients(model, plain))


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    result = torch.autograd.grad(loss, list(model.parameters()))
    return {name: item for (name, _), item in zip(model.named_parameters(), result, strict=True)}


def assert_alike(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Relative error of each tensor at most 0.001."""
    assert result.keys() == expected.keys()
    for name, gradient in result.items():
        difference = (gradient.reshape(-1) - expected[name].reshape(-1)).norm()
        assert difference <= 1e-3 * expected[name].norm() + 1e-6, name


@pytest.mark.parametrize("at_once", [29 * 64, 1 << 24])
def test_loss_in_pieces_is_the_loss(at_once: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("unspool.train.learning.objectives._LOGITS_PER_CHUNK", at_once)
    model = tiny_model(head_bias=True, tied=False)
    x = torch.randn(3, 50, 32, generator=rng(), requires_grad=True)
    targets, weights = random_ids(3, 50), torch.rand(3, 50, generator=rng())
    logits = model.logits(x).flatten(0, 1)
    item = functional.cross_entropy(logits, targets.flatten(), reduction="none")
    target = (item * weights.flatten()).sum() * 0.5
    expected = torch.autograd.grad(target, [x, *model.head.parameters(), model.norm.weight])
    summed = summed_loss(model, x, targets, weights) * 0.5
    result = torch.autograd.grad(summed, [x, *model.head.parameters(), model.norm.weight])
    assert torch.allclose(summed, target, rtol=1e-5)
    for actual, reference in zip(result, expected, strict=True):
        assert torch.allclose(actual, reference, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        assert torch.allclose(summed_loss(model, x, targets, weights), target * 2, rtol=1e-5)
    by_token = token_losses(model, x, targets)
    assert torch.allclose(by_token.flatten(), item, atol=1e-5)
    result = torch.autograd.grad((by_token * weights).sum() * 0.5, [x, model.norm.weight])
    assert torch.allclose(result[0], expected[0], atol=1e-5, rtol=1e-4)


def test_the_whole_logits_never_exist(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("unspool.train.learning.objectives._LOGITS_PER_CHUNK", 29 * 64)
    largest = 0
    logits = Transformer.logits

    def watched(self: Transformer, x: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, x.numel() // x.shape[-1])
        return logits(self, x)

    monkeypatch.setattr(Transformer, "logits", watched)
    model = tiny_model()
    model.embed.requires_grad_(False)  # a frozen head gets no gradient
    next_token(model, Batch(random_ids(8, 101)), rng()).mean.backward()
    assert largest == 64
    assert model.embed.weight.grad is None
    assert model.layers[0].attention.q.weight.grad is not None


def test_documents_do_not_see_each_other():
    """Two documents packed into one row give the losses that they have alone."""
    model = tiny_model(windows=(6, 0))
    ids = random_ids(1, 41)
    documents = torch.tensor([[0] * 25 + [1] * 15])
    tokens = ids[:, :-1]
    packed = hidden_states(
        model, tokens, AttentionMask.build(model.config, tokens, causal_within_documents(documents))
    )
    first, second = tokens[:, :25], tokens[:, 25:]
    alone = hidden_states(model, first, AttentionMask.build(model.config, first))
    assert torch.allclose(packed[:, :25], alone, atol=1e-5)
    # Rotary positions are relative: the second document may begin anywhere.
    alone = hidden_states(model, second, AttentionMask.build(model.config, second))
    assert torch.allclose(packed[:, 25:], alone, atol=1e-4)


def test_recomputed_activations_change_nothing():
    plain, careful = tiny_model(), tiny_model()
    recompute_activations(careful)
    batch = Batch(random_ids(2, 33))
    assert_alike(*(gradients(m, next_token(m, batch, rng()).mean) for m in (plain, careful)))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_layers_that_are_alike_are_compiled_once(kind: str):
    """Ten layers of one or two kinds share compiled graphs: one graph per layer would take minutes
    on a GPU, and after the eighth torch falls back to eager execution."""
    config = new_config(10, 64, 32, width=32)
    if kind == "gemma3":  # one layer of three sees all, the others a window
        config = replace(config, windows=tuple(0 if n % 3 == 2 else 8 for n in range(10)))
    model = new_model(config)
    torch._dynamo.reset()  # what other tests compiled counts too
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for layer in model.layers:
        layer.compile(backend=backend, dynamic=False)
    tokens = torch.arange(16).view(1, 16)
    hidden_states(model, tokens, AttentionMask.build(config, tokens)).sum().backward()
    assert len(graphs) == (1 if kind == "qwen3" else 2)


# -- The trainer's way through recurrent layers ---------------------------------------------------


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
    "name",
    ["conv", *(pytest.param(extra, marks=pytest.mark.slow) for extra in ("delta", "mamba2"))],
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
    result = {id(parameter) for parameter in parameter_groups(model)[group]}
    return [name for name, parameter in model.named_parameters() if id(parameter) in result]


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "qwen3-next"])
def test_gradients_are_those_of_transformers(name: str, tmp_path):
    reference = tiny.save(name, tmp_path)
    model = load_transformer(open_checkpoint(tmp_path)).requires_grad_(True)
    tokens = torch.randint(3, 259, (2, 70), generator=torch.Generator().manual_seed(1))
    loss = next_token(model, TrainingBatch(tokens, None, None), torch.Generator()).mean
    target = reference(tokens, labels=tokens).loss
    assert torch.allclose(loss, target, rtol=1e-4)
    # A gradient has the layout of its weight, so the rules for weights name it as they do.
    named = write_weights(model.config, rules_for_hf(model.config), gradients(model, loss))
    result = {key.replace("{p}", "model."): value for key, value in named.items()}
    expected = gradients(reference, target)
    for item in (result, expected):  # files call what is in experts otherwise than the module does
        for key in [key for key in item if ".experts." in key]:
            del item[key]
    assert_alike(result, expected)
