"""MTP layers of a checkpoint: found, as published, and the text is the same with and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch.nn import functional

import unspool
from helpers.heads_support import PROMPT, read_text
from helpers.mtp_support import change_tensor, expected_logits, random_model, rename_to_glm
from helpers.tiny_gguf import write_tiny
from unspool.cli.main import _exit_code
from unspool.decoding.speculative.controller import DraftShape, FixedShape
from unspool.decoding.speculative.head import DraftNode, build_draft
from unspool.decoding.speculative.head_drafter import HeadDrafter
from unspool.decoding.speculative.mtp import load_mtp
from unspool.errors import ModelFileError, SettingsError
from unspool.model.files.checkpoint import open_checkpoint, save_checkpoint
from unspool.model.files.safetensors import SafetensorsFile

FAMILIES = ("qwen3.5", "qwen3", "llama")
WAYS = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 4})


def saved(folder: Path, family: str, **changes: Any) -> Any:
    model = random_model(family, **changes)
    save_checkpoint(model, folder)
    return model


def chain_logits(head: Any, lm: Any, tokens: list[int], count: int) -> tuple[Any, list[int]]:
    context = read_text(head, lm, tokens)
    node, logits, chain = DraftNode(tokens[-1]), [], list[int]()
    for depth in range(1, count + 1):
        logits.append(context.expand([node], tokens)[0])
        chain.append(int(logits[-1].argmax()))
        node = DraftNode(chain[-1], node, depth)
    return np.stack(logits), chain


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_text_is_the_same(tmp_path: Path, family: str, backend: str):
    model = saved(tmp_path, family)
    with unspool.load(tmp_path, backend=backend, device="cpu", memory=8 << 20) as lm:
        head = load_mtp(lm.path, lm.model, lm.context)
        logits, chain = chain_logits(head, lm, PROMPT, 4)
        expected = expected_logits(model, PROMPT, chain[:-1])
        assert np.corrcoef(logits.ravel(), expected.ravel())[0, 1] > 0.999
        assert np.allclose(logits, expected, atol=0.05 if backend == "native" else 1e-3)
        for options in WAYS:
            plain = [lm.generate(p, max_tokens=24, end=False, **options) for p in (PROMPT, [5])]
            for shape in (DraftShape(1), DraftShape(4), DraftShape(9, width=3, depth=4)):
                drafted = [
                    lm.generate(
                        text.prompt, max_tokens=24, end=False, **options,
                        speculate=lambda r, s=shape: HeadDrafter(head, r, FixedShape(s)),
                    )
                    for text in plain
                ]  # fmt: skip
                assert [text.tokens for text in drafted] == [text.tokens for text in plain]
                assert any(step.draft for text in drafted for step in text.steps)
        text = lm.generate(PROMPT, max_tokens=30, seed=2, speculate="mtp:3")
        assert text.tokens == lm.generate(PROMPT, max_tokens=30, seed=2).tokens


def test_a_rewound_text_is_read_again(tmp_path: Path):
    saved(tmp_path, "qwen3")
    with unspool.load(tmp_path, backend="torch", device="cpu", memory=8 << 20) as lm:
        head = load_mtp(lm.path, lm.model, lm.context)
        context = read_text(head, lm, PROMPT)
        build_draft(context, PROMPT, head.ids, DraftShape(4), 0.8)
        context.truncate(8)
        fork = context.fork(8)
        expected = read_text(head, lm, PROMPT[:9])
        for again in (context, fork):
            assert len(again) == 8
            drafts = [
                build_draft(c, PROMPT[:9], head.ids, DraftShape(5), 0.8) for c in (again, expected)
            ]
            assert drafts[0] == drafts[1]


def test_the_layer_is_that_of_qwen3_5(tmp_path: Path):
    """Against transformers' own decoder layer, with the published names and shapes."""
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import (
        Qwen3_5DecoderLayer,
        Qwen3_5TextRotaryEmbedding,
    )

    model = saved(tmp_path, "qwen3.5")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    w = {n: torch.tensor(file.stored(n).float32()) for n in file.tensors if n[:4] == "mtp."}
    width = model.config.width
    assert w["mtp.fc.weight"].shape == (width, 2 * width)
    config = Qwen3_5TextConfig(**json.loads((tmp_path / "config.json").read_text()))
    config._attn_implementation = "eager"
    layer = Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention")).eval()
    prefix = "mtp.layers.0."
    layer.load_state_dict({n.removeprefix(prefix): t for n, t in w.items() if prefix in n})

    def norm(x: Any, name: str) -> Any:
        return functional.rms_norm(x, (width,), 1 + w[f"mtp.{name}.weight"], config.rms_norm_eps)

    with unspool.load(tmp_path, backend="torch", device="cpu", memory=8 << 20) as lm:
        head = load_mtp(lm.path, lm.model, lm.context)
        context = read_text(head, lm, PROMPT)
        logits = context.expand([DraftNode(PROMPT[-1])], PROMPT)[0]
        hidden, following = context.hidden[None].clone(), torch.tensor([PROMPT[1:]])
    with torch.no_grad():
        pair = (norm(model.embed(following), "pre_fc_norm_embedding"),
                norm(hidden, "pre_fc_norm_hidden"))  # fmt: skip
        x = torch.cat(pair, -1) @ w["mtp.fc.weight"].T
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1],) * 2, -1e9).triu(1)[None, None]
        rope = Qwen3_5TextRotaryEmbedding(config)(x, positions)
        out = layer(x, position_embeddings=rope, attention_mask=mask)
        out = out[0] if isinstance(out, tuple) else out
        expected = model.head_logits(norm(out.view(x.shape)[:, -1], "norm"))[0]
    assert np.allclose(logits, expected.numpy(), atol=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_one_more_layer_as_in_glm(tmp_path: Path, family: str):
    model = saved(tmp_path, family)
    before = dict(open_checkpoint(tmp_path).mtp.weights())  # type: ignore[union-attr]
    rename_to_glm(tmp_path, model.config.layers)
    with pytest.raises(ModelFileError, match="the file has more"):
        open_checkpoint(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_nextn_predict_layers": 1}))
    after = dict(open_checkpoint(tmp_path).mtp.weights())  # type: ignore[union-attr]
    assert before.keys() == after.keys() == model.mtp.state_dict().keys()
    for name, tensor in after.items():
        assert np.array_equal(tensor.float32(), before[name].float32())


def test_in_a_gguf_file(tmp_path: Path):
    """A Llama file: queries and keys are permuted there, also in the MTP layer."""
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32),
              "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "attn_norm": (32,),
              "ffn_norm": (32,), "nextn.eh_proj": (32, 64), "nextn.enorm": (32,),
              "nextn.hnorm": (32,)}  # fmt: skip

    def change(tensors: dict[str, np.ndarray]) -> None:
        rng = np.random.default_rng(1)
        for name, shape in shapes.items():
            values = rng.standard_normal(shape) / 32**0.5 + (len(shape) == 1)
            tensors[f"blk.1.{name}.weight"] = values.astype(np.float32)

    numbers = {"block_count": 2, "nextn_predict_layers": 1}
    path = write_tiny(tmp_path / "a.gguf", numbers=numbers, change=change)
    mtp = open_checkpoint(path).mtp
    assert mtp is not None and mtp.config.layers == 1 and mtp.num_layers == 1
    weights = {name: tensor.float32() for name, tensor in mtp.weights()}
    stored = {t.name: t.data for t in gguf.GGUFReader(path).tensors}
    assert np.array_equal(weights["fc.weight"], stored["blk.1.nextn.eh_proj.weight"])
    assert np.array_equal(weights["embed_norm.weight"], stored["blk.1.nextn.enorm.weight"])
    assert np.array_equal(weights["norm.weight"], stored["output_norm.weight"])  # as llama.cpp
    query = stored["blk.1.attn_q.weight"].reshape(4, 4, 2, 32).swapaxes(1, 2).reshape(32, 32)
    assert np.array_equal(weights["layer.attention.q.weight"], query)
    with unspool.load(path, device="cpu", memory=8 << 20, progress=False) as lm:
        head = load_mtp(lm.path, lm.model, lm.context)
        plain = lm.generate("he said", max_tokens=20, seed=1, end=False)
        drafted = lm.generate(
            "he said", max_tokens=20, seed=1, end=False,
            speculate=lambda r: HeadDrafter(head, r, FixedShape(DraftShape(3))),
        )  # fmt: skip
        assert drafted.tokens == plain.tokens and any(step.draft for step in drafted.steps)


def test_what_does_not_fit_is_refused(tmp_path: Path, native: Any):
    with pytest.raises(SettingsError, match="has no MTP layers"):
        native.generate(PROMPT, speculate="mtp")
    saved(tmp_path, "qwen3")
    full = (tmp_path / "model.safetensors").read_bytes()
    for name, tensor, problem in (
        ("mtp.fc.weight", torch.ones(48, 48), r"fc\.weight has shape \(48, 48\), expected"),
        ("mtp.norm.weight", torch.ones(40), r"norm\.weight has shape \(40,\), expected \(48,\)"),
        ("mtp.layers.0.self_attn.q_proj.weight", torch.ones(9, 48), r"q_proj.*has shape"),
        ("mtp.layers.0.mlp.up_proj.weight", None, r"lacks mtp\.layers\.0\.mlp\.up_proj"),
        ("mtp.pre_fc_norm_hidden.weight", None, "lacks mtp.pre_fc_norm_hidden"),
    ):
        (tmp_path / "model.safetensors").write_bytes(full)
        change_tensor(tmp_path, name, tensor)
        with unspool.load(tmp_path, backend="torch", device="cpu", memory=8 << 20) as lm:
            assert lm.generate(PROMPT, max_tokens=2).tokens  # the model itself can be used
            with pytest.raises(ModelFileError, match=problem) as caught:
                lm.generate(PROMPT, speculate="mtp")
            assert str(tmp_path) in str(caught.value)


def test_it_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved(tmp_path, "qwen3")
    assert _exit_code(["models", "show", str(tmp_path)]) == 0
    assert "1 layer for speculative decoding: --speculate mtp" in capsys.readouterr().out
