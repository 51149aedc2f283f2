"""Drafting heads on a GPU: the text is the same with and without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.cuda_support import cuda_model, language_model
from helpers.heads_support import PROMPT, save_eagle
from helpers.mtp_support import random_model
from helpers.paged_texts import RandomCheckpoint, config
from unspool.backends.cuda import prefill
from unspool.decoding.speculative.controller import FixedShape
from unspool.decoding.speculative.eagle import load_eagle
from unspool.decoding.speculative.head import DraftNode, DraftShape
from unspool.decoding.speculative.head_drafter import HeadDrafter
from unspool.decoding.speculative.mtp import load_mtp
from unspool.model.files.checkpoint import open_checkpoint, save_checkpoint

TINY = config(layers=2, context=4096, vocab_size=259, width=64)
TEXT = (PROMPT * 300)[:3000]


@pytest.mark.parametrize("exact", [True, False])
def test_the_text_is_the_same(
    device: str, tmp_path: Path, exact: bool, monkeypatch: pytest.MonkeyPatch
):
    """To the bit: where few lines are each multiplied by themselves, also without `exact`."""
    model = cuda_model(RandomCheckpoint(TINY), device=device, dtype="bfloat16", exact=exact)
    with language_model(model) as lm:
        backend: Any = lm.engine.backend
        if not exact:  # the end of a prompt whose hidden states are read would use other kernels
            backend.graph_tokens = 0
            monkeypatch.setattr(prefill, "_TOKENS_PER_OUTPUT", 1 << 30)
        save_eagle(tmp_path, lm, layers=(0, 1, 2))
        head = load_eagle(tmp_path, lm.model)
        for prompt in (PROMPT, PROMPT[:2], TEXT[:600]):
            options: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "seed": 4}
            undrafted = lm.generate(prompt, **options)
            for shape in (DraftShape(1), DraftShape(5)):
                drafted = lm.generate(
                    prompt, **options,
                    speculate=lambda request, shape=shape: HeadDrafter(head, request,
                    FixedShape(shape)),
                )  # fmt: skip
                assert drafted.tokens == undrafted.tokens
                assert [s.logprob for s in drafted.steps] == [s.logprob for s in undrafted.steps]
                assert any(step.draft for step in drafted.steps)


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_mtp_layers(device: str, tmp_path: Path, family: str):
    save_checkpoint(random_model(family), tmp_path)
    model = cuda_model(open_checkpoint(tmp_path), device=device, dtype="bfloat16", exact=True)
    with language_model(model) as lm:
        head = load_mtp(tmp_path, lm.model, lm.context)
        options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 4, "end": False}
        undrafted = lm.generate(PROMPT, **options)
        for shape in (DraftShape(1), DraftShape(4)):
            drafted = lm.generate(
                PROMPT, **options,
                speculate=lambda r, shape=shape: HeadDrafter(head, r, FixedShape(shape)),
            )  # fmt: skip
            assert drafted.tokens == undrafted.tokens
            assert any(step.draft for step in drafted.steps)


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_captured_levels(device: str, tmp_path: Path, kind: str):
    """A head's short reads and levels give the logits that its single operations give."""
    save_checkpoint(random_model("qwen3"), tmp_path)
    model = cuda_model(open_checkpoint(tmp_path), device=device, dtype="bfloat16")
    with language_model(model) as lm:
        if kind == "mtp":
            head: Any = load_mtp(tmp_path, lm.model, lm.context)
        else:
            save_eagle(tmp_path / "head", lm, layers=(0, 1, 2))
            head = load_eagle(tmp_path / "head", lm.model)
        random = np.random.default_rng(0)
        text = random.integers(0, 259, 400).tolist()
        width = model.config.width
        vectors = random.standard_normal((len(head.layers), 400, width)).astype(np.float32)
        results = []
        for captures in (False, True):
            head.captures_graphs, context = captures, head.context()
            head._free.clear()
            logits = list[Any]()
            for count in (30, 1, 8, 3, *[8] * 40):
                places = np.arange(len(context), len(context) + count)
                context.read(places, vectors[:, places], [text[n + 1] for n in places])
                tokens = text[: len(context) + 1]
                node = DraftNode(tokens[-1])
                logits.append(context.expand([node], tokens).float().cpu().clone())
                for depth in (1, 2, 3):  # the token is on the device, as in a chain
                    token = head.ids[places[:1] % 200]
                    node = DraftNode(token, node, depth)
                    logits.append(context.expand([node], tokens).float().cpu().clone())
            results.append(torch.cat(logits))
        scale = results[0].abs().max()
        assert ((results[0] - results[1]).abs().max() / scale) < 0.03
        assert results[0].std() > 0.05 * scale
