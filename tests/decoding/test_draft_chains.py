"""Chains of drafting heads stay on the device and equal those drafted level by level."""

from __future__ import annotations

import collections
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import unspool
from helpers.cuda_support import cuda_model, torch_model
from helpers.heads_support import PROMPT, read_text, save_eagle, vectors_of
from helpers.mtp_support import expected_logits, random_model
from helpers.paged_texts import RandomCheckpoint, config
from unspool.backends.cuda.graphs import GraphCache
from unspool.decoding.speculative.controller import DraftShape
from unspool.decoding.speculative.eagle import load_eagle
from unspool.decoding.speculative.head import DraftNode, build_draft
from unspool.decoding.speculative.mtp import load_mtp
from unspool.model.files.checkpoint import save_checkpoint

WIDTH, VOCABULARY = 48, 259


class MetaModel:
    """A model on the meta device, where every copy to the host raises."""

    device = "meta"

    def __init__(self, config: Any) -> None:
        self.config = config

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.dtype == torch.int32 and tokens.is_meta
        return torch.empty(len(tokens), WIDTH, dtype=torch.bfloat16, device="meta")

    def project(self, vectors: torch.Tensor) -> torch.Tensor:
        assert vectors.dtype == torch.bfloat16 and vectors.is_meta
        return vectors.new_empty(len(vectors), VOCABULARY)

    def vector(self, name: str) -> Any:
        return np.ones(WIDTH, np.float32)


def draft_greedily(context: Any, ids: Any, shape: DraftShape, temperature: float) -> list[int]:
    """The chain, level by level: every token goes through the host."""
    node, score, chain = DraftNode(PROMPT[-1]), 0.0, list[int]()
    for depth in range(1, shape.levels + 1):
        logits = context.expand([node], PROMPT)[0].double() / temperature
        place = int(logits.argmax())
        score += float(logits[place] - logits.logsumexp(0))
        if shape.min_probability and score < math.log(shape.min_probability):
            break
        node = DraftNode(int(ids[place]), node, depth)
        chain.append(int(ids[place]))
    return chain


def make_head(kind: str, folder: Path, model: Any) -> Any:
    """The MTP layer in the folder of the model, or a random EAGLE-3 head."""
    if kind == "mtp":
        return load_mtp(folder, model, 256)
    save_eagle(folder / "head", model, layers=(0, 1, 2))
    return load_eagle(folder / "head", model)


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    save_checkpoint(random_model(getattr(request, "param", "qwen3")), tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_a_chain_is_copied_to_the_host_once(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_head(kind, folder, MetaModel(random_model().config))
    context, count = head.context(), len(PROMPT) - 1
    vectors = torch.empty(len(head.layers), count, WIDTH, device="meta")
    context.read(np.arange(count), vectors, PROMPT[1:])
    copies = list[torch.Size]()

    def copy(tensor: torch.Tensor) -> list[int]:
        copies.append(tensor.shape)
        return [7] * len(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", copy)
    assert build_draft(context, PROMPT, head.ids, DraftShape(5), 0.8) == [7] * 5
    assert copies == [(5,)]


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_a_chain_copies_nothing_to_the_device(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unspool.load(folder, backend="torch", device="cpu", memory=8 << 20) as lm:
        head = make_head(kind, folder, lm.model)
        context = read_text(head, lm, PROMPT)
        monkeypatch.setattr(head, "to_device", lambda array: pytest.fail("a copy"))
        assert len(build_draft(context, PROMPT, head.ids, DraftShape(5), 0.8)) == 5


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
@pytest.mark.parametrize("min_probability", [0.0, 0.02, 0.5, 0.99])
def test_a_chain_is_what_the_levels_say_one_by_one(
    folder: Path, kind: str, min_probability: float
) -> None:
    shape = DraftShape(6, min_probability=min_probability)
    with unspool.load(folder, backend="torch", device="cpu", memory=8 << 20) as lm:
        head = make_head(kind, folder, lm.model)
        context = read_text(head, lm, PROMPT)
        fork = context.fork(len(context))
        expected = draft_greedily(fork, head.ids, shape, 0.6)
        for _ in range(2):
            assert build_draft(context, PROMPT, head.ids, shape, 0.6) == expected


def test_levels_below_the_minimum_probability_are_not_computed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unspool.load(folder, backend="torch", device="cpu", memory=8 << 20) as lm:
        head = make_head("mtp", folder, lm.model)
        context, depths = read_text(head, lm, PROMPT), list[int]()
        expand = context.expand

        def count(nodes: list[DraftNode], tokens: list[int]) -> torch.Tensor:
            depths.append(nodes[0].depth)
            return expand(nodes, tokens)

        monkeypatch.setattr(context, "expand", count)
        likely = build_draft(context, PROMPT, head.ids, DraftShape(6, min_probability=0.5), 0.6)
        assert depths == list(range(len(likely) + 1)) and 0 < len(likely) < 6


@pytest.mark.parametrize("folder", ["llama", "qwen3.5"], indirect=True)
def test_the_norms_of_a_head_are_single_operations(folder: Path) -> None:
    head = make_head("mtp", folder, MetaModel(random_model().config))
    norms = [m for m in head._mtp.modules() if "Norm" in type(m).__name__]
    assert norms and all(type(m) is nn.RMSNorm and m.weight.dtype == head.dtype for m in norms)


@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.5, False), (0.0, True), (0.5, True)])
def test_scores_are_capped_and_sinks_take_their_share(
    folder: Path, softcap: float, has_sinks: bool
) -> None:
    model = random_model()
    with unspool.load(folder, backend="torch", device="cpu", memory=8 << 20) as lm:
        head = make_head("mtp", folder, lm.model)
        for attention in (head.attention, model.mtp.layer.attention):
            attention.config = dataclasses.replace(
                attention.config, attention_softcap=softcap, sinks=has_sinks
            )
            if has_sinks:
                attention.sinks = nn.Parameter(torch.linspace(-1, 3, attention.shape.heads))
        context, node = read_text(head, lm, PROMPT), DraftNode(PROMPT[-1])
        logits, chain = list[Any](), list[int]()
        for depth in range(1, 4):
            logits.append(context.expand([node], PROMPT)[0].numpy())
            chain.append(int(logits[-1].argmax()))
            node = DraftNode(chain[-1], node, depth)
        assert np.allclose(logits, expected_logits(model, PROMPT, chain[:-1]), atol=1e-3)


def test_only_distances_between_positions_matter(folder: Path) -> None:
    """Also where the RoPE tables have grown, and with gaps between the positions."""
    with unspool.load(folder, backend="torch", device="cpu", memory=8 << 20) as lm:
        head = make_head("mtp", folder, lm.model)
        vectors, following = vectors_of(lm, PROMPT[:-1], head.layers), PROMPT[1:]
        places = np.array([*range(6), *range(10, 22)])
        logits = list[Any]()
        for offset, num_reads in ((0, 2), (0, 1), (5000, 1), (3, 1), (9000, 2)):
            context = head.context()
            for part in np.array_split(np.arange(len(places)), [6] if num_reads == 2 else []):
                rows = [following[row] for row in part]
                context.read(places[part] + offset, vectors[:, part], rows)
            tokens = [0] * (offset + 22) + PROMPT[-1:]
            root = DraftNode(tokens[-1])
            context.expand([root], tokens)
            logits.append(context.expand([DraftNode(5, root, 1)], tokens)[0].numpy())
        assert np.allclose(logits[1], logits[0], atol=1e-5)
        assert np.allclose(logits, logits[0], atol=1e-2)
        context.read(np.array([9023]), vectors[:, :1], [5])
        assert not np.allclose(context.expand([root], tokens)[0].numpy(), logits[0], atol=1e-2)


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_in_graphs_a_head_drafts_the_same(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short reads and chains as on a GPU; without one their functions are called."""
    shapes = (DraftShape(5), DraftShape(6, min_probability=0.01), DraftShape(7, width=2, depth=4))
    random, runs = np.random.default_rng(1), collections.Counter[Any]()
    run = GraphCache.run
    monkeypatch.setattr(GraphCache, "run", lambda *a: runs.update([a[1]]) or run(*a))
    with unspool.load(folder, backend="torch", device="cpu", memory=8 << 20) as lm:
        head = make_head(kind, folder, lm.model)
        text = random.integers(0, VOCABULARY, 400).tolist()
        vectors = random.standard_normal((len(head.layers), 400, WIDTH)).astype(np.float32)

        def write(captures: bool) -> tuple[list[Any], list[Any]]:
            head.captures_graphs, contexts = captures, [head.context()]
            drafts, logits = list[Any](), list[Any]()

            def read(count: int) -> None:
                context = contexts[-1]
                places = np.arange(len(context), len(context) + count)
                context.read(places, vectors[:, places], [text[n + 1] for n in places])
                tokens = text[: len(context) + 1]
                drafts.extend(build_draft(context, tokens, head.ids, s, 0.7) for s in shapes)
                root = DraftNode(tokens[-1])
                logits.append(context.expand([root], tokens).clone())
                logits.append(context.expand([DraftNode(5, root, 1)], tokens).clone())

            for count in (20, 1, 8, 3, 9, 2):
                read(count)
            contexts[-1].truncate(25)
            for count in (4, 1):
                read(count)
            contexts.append(contexts[-1].fork(15))
            for count in (1, *[8] * 37):  # also when the buffers grow
                read(count)
            del contexts[:]  # the next text gets its buffers, also after numbers that were broken
            with torch.inference_mode():
                for free in head._free:
                    free.values.fill_(torch.nan)
                    if free.graphs is not None:
                        free.graphs._vectors.fill_(torch.nan)
            contexts.append(head.context())
            for count in (7, 2):
                read(count)
            return drafts, logits

        expected, expected_logits = write(False)
        assert not runs
        head._free.clear()
        drafts, logits = write(True)
        for pair in zip(logits, expected_logits, strict=True):
            torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)
        assert drafts == expected
        assert (runs["read"], runs["root"]) == (46, 4 * 46) and runs["level"] > 5 * 46


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_device_model_embeds_and_projects_like_the_reference(scale: float) -> None:
    checkpoint = RandomCheckpoint(config(embedding_scale=scale, logit_scale=scale))
    model, reference = cuda_model(checkpoint), torch_model(checkpoint)
    expected = reference.rows("embed.weight", 0, 67)[[3, 66, 3]] * scale
    embedded = model.embed(torch.tensor([3, 66, 3], dtype=torch.int32))
    assert np.allclose(embedded.numpy(), expected, atol=1e-6)
    assert np.allclose(model.logits(expected), reference.logits(expected), atol=1e-4)
