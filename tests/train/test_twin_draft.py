"""The drafting head against drafting one token after the other; its loss against its formula."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.tiny_training import tiny_model
from unspool.model.layers.parts import apply_rope
from unspool.model.layers.transformer import Transformer
from unspool.train.data.batches import TrainingBatch
from unspool.train.twins.draft_head import (
    DraftHead,
    DraftHeadObjective,
    HeadShape,
    UnrolledDrafts,
    feature_layers,
    most_frequent_tokens,
    open_head,
    rms,
    save_head,
)


def rng(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def a_head(model: Transformer) -> DraftHead:
    torch.manual_seed(4)
    head = DraftHead(model.config, HeadShape((0, 1), 20, 16, 8), torch.arange(3, 23))
    head.init_from(model)
    with torch.no_grad():
        head.change.weight.normal_(0, 0.2, generator=rng())
    return head


def a_batch() -> TrainingBatch:
    ids = torch.randint(0, 29, (2, 25), generator=rng(3))
    documents = torch.zeros(2, 24, dtype=torch.int32)
    documents[1, 13:] = 1
    loss_mask = torch.ones(2, 24, dtype=torch.bool)
    loss_mask[:, :7] = False
    return TrainingBatch(ids, loss_mask, documents)


@torch.no_grad()
def inner(model: Transformer, tokens: Tensor) -> Tensor:
    """What goes into both layers, by the specification's own forward pass."""
    seen: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
        for layer in model.layers
    ]
    model(tokens[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 2)[0]


@torch.no_grad()
def drafted(
    model: Transformer, head: DraftHead, text: Tensor, more: Tensor, first: int
) -> list[Tensor]:
    """Guesses behind `text` and behind each of the tokens that follow it, one after the other. The
    causal model has seen all of the text but its last token. Positions count from `first`."""
    eps, config = head.config.norm_eps, head.config
    count = len(text) - 1
    f = head.fuse_features(inner(model, text)[:count])
    places = np.arange(first, first + len(text) + len(more))
    tables = model.rope_tables(places, 64)[-1]
    assert tables is not None
    cosine, sine = tables.cosine, tables.sine
    x = rms(f, head.context_norm, eps)
    keys, values = (
        part(x).view(count, config.kv_heads, config.head_width) for part in (head.k, head.v)
    )
    keys = apply_rope(keys, cosine[:count, None], sine[:count, None])
    nothing = torch.zeros(1, config.kv_heads, config.head_width)
    keys, values = torch.cat((nothing, keys)), torch.cat((nothing, values))
    before = f[-1] if count else torch.zeros(config.width)
    known, guesses = text.tolist(), []
    layer = head.layers[0]
    for step in range(len(more) + 1):
        state = head.join_inputs(before, model.embed.weight[known[-1]])
        query = layer.q(rms(state, layer.norm, eps)).view(config.heads, config.head_width)
        query = apply_rope(query, cosine[count + step], sine[count + step])
        group = config.heads // config.kv_heads
        mixed = []
        for number in range(config.heads):
            weights = (keys[:, number // group] @ query[number] * config.scale).softmax(0)
            mixed.append(weights @ values[:, number // group])
        state = state + layer.out(torch.cat(mixed))
        fed = rms(state, layer.feed_norm, eps)
        state = state + layer.down(torch.nn.functional.silu(layer.gate(fed)) * layer.up(fed))
        before = state
        said = [
            head.recent(rms(model.embed.weight[known[-1 - back]], head.recent_norm, eps))
            .chunk(4)[back]
            for back in range(4)
        ]  # fmt: skip
        guesses.append(head.output_state(state, head.from_recent(torch.cat(said))))
        if step < len(more):
            known.append(int(more[step]))
    return guesses


def test_drafts_of_whole_rows_are_those_of_one_text():
    model, batch = tiny_model().requires_grad_(False), a_batch()
    head = a_head(model)
    drafts = UnrolledDrafts(model, head, batch, {})
    found = [drafts.step(ahead) for ahead in range(3)]
    for row, begin, place in ((0, 0, 9), (0, 0, 5), (1, 13, 18)):
        text = batch.inputs[row, begin : place + 1]
        more = batch.inputs[row, place + 1 : place + 3]
        for ahead, guess in enumerate(drafted(model, head, text, more, begin)):
            assert torch.allclose(found[ahead][row, place], guess, atol=1e-4), (row, place, ahead)


def test_the_loss_compares_with_what_the_causal_model_says():
    model, batch = tiny_model().requires_grad_(False), a_batch()
    head = a_head(model)
    loss = DraftHeadObjective(model, steps=3)(head, batch, rng())
    drafts = UnrolledDrafts(model, head, batch, {})
    table = model.embed.weight[3:23]
    weights = [math.exp(-ahead / 4) for ahead in range(3)]
    total = torch.tensor(0.0)
    for ahead in range(3):
        guess, losses = drafts.step(ahead), []
        for row, end in ((0, 24), (1, 24)):
            for place in range(7, 24):
                begin = 13 if row == 1 and place >= 13 else 0
                end = 13 if row == 1 and place < 13 else 24
                if place + ahead + 1 >= end:
                    continue
                said = model(batch.inputs[row : row + 1, begin : place + ahead + 1])[0, -1]
                chances = (said / 0.8).softmax(-1)[3:23]
                ours = (table @ guess[row, place] / 0.8).log_softmax(-1)
                losses.append(-(chances * ours).sum())
        total = total + torch.stack(losses).mean() * weights[ahead] / sum(weights)
    assert torch.allclose(loss.mean, total, rtol=1e-4)
    loss.mean.backward()
    assert all(value.grad is not None for value in head.parameters())
    assert all(value.grad is None for value in model.parameters())


@pytest.mark.parametrize("type", ["F16", "Q8_0", "Q4_1"])
def test_a_head_comes_back_from_its_files(type: str, tmp_path: Path):
    model = tiny_model(width=64, head_width=32, heads=2, kv_heads=1, ff_width=96)
    head = DraftHead(model.config, HeadShape((0, 1), 20, 32, 32), torch.arange(3, 23))
    save_head(
        head.state_dict(), head.shape, head.config, tmp_path, base="it", fingerprint="f", type=type
    )
    shape, weights = open_head(tmp_path)
    assert shape == head.shape
    exactness = {"F16": 1e-3, "Q8_0": 2e-2, "Q4_1": 0.2}[type]
    for name, value in head.state_dict().items():
        far = (weights[name] - value).abs().max()
        assert far <= exactness * float(value.abs().max()) + 1e-6, name


def test_the_layers_that_are_read():
    assert feature_layers(30) == (2, 11, 20, 27)
    assert feature_layers(1) == (0,)
    assert max(feature_layers(4)) < 4


def test_the_tokens_that_can_be_drafted_are_those_written_most():
    written = np.repeat([7, 2, 9, 4], [5, 1, 3, 2])
    assert most_frequent_tokens(written, 12, 3).tolist() == [4, 7, 9]
    assert len(most_frequent_tokens(written, 12, 50)) == 12


@pytest.mark.parametrize("changes", [{"norm_plus_one": True}, {"tied": False}])
def test_heads_of_other_models(changes: dict[str, bool]):
    model = tiny_model(**changes).requires_grad_(False)
    loss = DraftHeadObjective(model, steps=2)(a_head(model), a_batch(), rng())
    assert torch.isfinite(loss.mean)
