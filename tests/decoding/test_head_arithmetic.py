"""Drafting heads as arithmetic: kernels, numpy and torch agree, and EAGLE-3 is as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.heads_support import IDS, PROMPT, read_text, save_eagle, save_own, vectors_of
from unspool.decoding.speculative.head import DraftNode, UnspoolHead, read_head
from unspool.decoding.speculative.head_cpu import CpuHead


def a_tree(tokens: list[int]) -> list[list[DraftNode]]:
    root = DraftNode(tokens[-1])
    first = [DraftNode(int(IDS[5]), root, 1), DraftNode(int(IDS[90]), root, 1)]
    return [
        [root],
        first,
        [DraftNode(int(IDS[7]), first[1], 2), DraftNode(int(IDS[8]), first[0], 2)],
    ]


@pytest.mark.parametrize("weights", ["F32", "Q8_0", "Q4_1"])
def test_the_kernels_compute_what_the_specification_says(native: Any, tmp_path: Path, weights: str):
    save_own(tmp_path, native, weights=weights, heads=6, kv_heads=3, head_width=8)
    files = read_head(tmp_path)
    quick, plain = CpuHead(files, native.model, native.context), UnspoolHead(files, native.model)
    tokens = (PROMPT * 5)[:83]
    contexts = [read_text(head, native, tokens) for head in (quick, plain)]
    for level in a_tree(tokens):
        item, other = (context.expand(level, tokens).copy() for context in contexts[:1] * 2)
        assert np.array_equal(item, other), "the same twice"
        expected = contexts[1].expand(level, tokens)
        # Blocks are multiplied with rows rounded to 8 bits; the head's own rows are in 8
        # bits.
        assert np.abs(item - expected).max() < 0.06 * np.abs(expected).max()
        assert np.corrcoef(item.ravel(), expected.ravel())[0, 1] > 0.998
        contexts[0].expand(level, tokens)  # sets the states that the next level uses
    for context in contexts:
        context.truncate(40)
        assert len(context) == 40
    again = read_text(plain, native, tokens[:41])
    root = a_tree(tokens[:41])[0]
    cut = contexts[1].expand(root, tokens[:41])
    assert np.allclose(again.expand(root, tokens[:41]), cut, atol=1e-5)
    assert np.corrcoef(contexts[0].expand(root, tokens[:41]).ravel(), cut.ravel())[0, 1] > 0.998


def test_numpy_and_torch_alike(native: Any, unspool_head: Path, eagle: Path):
    tokens = PROMPT
    for load in (
        lambda device: UnspoolHead(read_head(unspool_head), native.model, device),
        lambda device: _eagle(eagle, native, device),
    ):
        result = []
        for device in (None, "cpu"):
            head = load(device)
            context = read_text(head, native, tokens)
            result.append([context.expand(level, tokens) for level in a_tree(tokens)])
        for item, other in zip(*result, strict=True):
            assert np.allclose(item, other, atol=1e-4)


def _eagle(folder: Path, lm: Any, device: str | None) -> Any:
    from unspool.decoding.speculative.eagle import EagleHead

    return EagleHead(folder, json.loads((folder / "config.json").read_text()), lm.model, device)


@pytest.mark.parametrize(("kind", "before"), [("llama", False), ("llama", True), ("qwen3", False)])
def test_eagle_3_as_published(native: Any, tmp_path: Path, kind: str, before: bool):
    """Against the formula, written down once more with torch for a whole sequence at a time."""
    weights = save_eagle(tmp_path, native, kind=kind, before=before)
    head, tokens = _eagle(tmp_path, native, None), PROMPT
    assert head.ids.tolist() == IDS.tolist()
    vectors = vectors_of(native, tokens[:-1], head.layers)
    context = head.context()
    context.read(np.arange(len(tokens) - 1), vectors, tokens[1:])
    chain, drafted = list[int](), list[Any]()
    node = DraftNode(tokens[-1])
    for depth in range(1, 5):
        drafted.append(context.expand([node], tokens)[0])
        chain.append(int(head.ids[drafted[-1].argmax()]))
        node = DraftNode(chain[-1], node, depth)
    expected = _published(weights, vectors, tokens[1:], chain[:-1], kind, before)
    assert np.allclose(np.stack(drafted), expected, atol=2e-3)


def _published(
    weights: dict[str, Any],
    vectors: Any,
    words: list[int],
    chain: list[int],
    kind: str,
    before: bool,
) -> Any:
    """Logits behind the text and each drafted token: every step runs the whole sequence anew."""
    w = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in weights.items()}
    at = "layers.0."

    def norm(x: Any, name: str) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w[name]

    hidden = torch.from_numpy(np.concatenate(list(vectors), -1)) @ w["fc.weight"].T
    ids, result = list(words), []
    for step in range(len(chain) + 1):
        length = len(ids)
        e = norm(w["embed_tokens.weight"][ids], at + "input_layernorm.weight")
        h = norm(hidden, at + "hidden_norm.weight")
        pair, residual = torch.cat([e, h], -1), h if before else hidden
        angle = torch.arange(length)[:, None] / 10000.0 ** (torch.arange(0, 8, 2) / 8)
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
        parts = {}
        for part, heads in (("q", 6), ("k", 2), ("v", 2)):
            x = (pair @ w[f"{at}self_attn.{part}_proj.weight"].T).view(length, heads, 8)
            if kind == "qwen3" and part != "v":
                x = norm(x, f"{at}self_attn.{part}_norm.weight")
            if part != "v":
                turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
                x = x * cos[:, None] + turned * sin[:, None]
            parts[part] = x.transpose(0, 1)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            parts["q"], parts["k"].repeat_interleave(3, 0), parts["v"].repeat_interleave(3, 0),
            is_causal=True,
        )  # fmt: skip
        x = (
            residual
            + mixed.transpose(0, 1).reshape(length, -1) @ w[at + "self_attn.o_proj.weight"].T
        )
        y = norm(x, at + "post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(y @ w[at + "mlp.gate_proj.weight"].T)
        out = x + (gate * (y @ w[at + "mlp.up_proj.weight"].T)) @ w[at + "mlp.down_proj.weight"].T
        result.append((norm(out[-1], "norm.weight") @ w["lm_head.weight"].T).numpy())
        if step < len(chain):  # the last output stands for what is known before the drafted token
            ids.append(chain[step])
            hidden = torch.cat([hidden, out[-1:]])
    return np.stack(result)
