"""Tiny random EAGLE-3 heads for the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

PROMPT = [7, 41, 99, 3, 150, 12, 200, 64, 31, 5, 18, 77, 240, 9, 11, 120, 33, 8, 54]
IDS = np.sort(np.random.default_rng(3).permutation(259)[:200])


def save_eagle(
    folder: Path, lm: Any, seed: int = 0, *, kind: str = "llama", before: bool = False,
    layers: tuple[int, ...] = (1, 2, 3),
) -> dict[str, Any]:  # fmt: skip
    """A random EAGLE-3 head, as `speculators` saves them; gives its tensors."""
    chance = np.random.default_rng(seed)
    width, heads, remaining, head_width, inner, count = lm.config.width, 6, 2, 8, 80, len(IDS)
    at = "layers.0."
    shapes = {
        "fc.weight": (width, 3 * width),
        "lm_head.weight": (count, width),
        at + "self_attn.q_proj.weight": (heads * head_width, 2 * width),
        at + "self_attn.k_proj.weight": (remaining * head_width, 2 * width),
        at + "self_attn.v_proj.weight": (remaining * head_width, 2 * width),
        at + "self_attn.o_proj.weight": (width, heads * head_width),
        at + "mlp.gate_proj.weight": (inner, width),
        at + "mlp.up_proj.weight": (inner, width),
        at + "mlp.down_proj.weight": (width, inner),
        "embed_tokens.weight": (lm.config.vocab_size, width),
    }
    tensors: dict[str, Any] = {
        name: (chance.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    norms = ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    for name in ["norm.weight", *(f"{at}{norm}.weight" for norm in norms)]:
        tensors[name] = (1 + 0.2 * chance.standard_normal(width)).astype(np.float32)
    if kind == "qwen3":
        for part in "qk":
            gain = 1 + 0.2 * chance.standard_normal(head_width)
            tensors[f"{at}self_attn.{part}_norm.weight"] = gain.astype(np.float32)
    tensors["d2t"] = IDS - np.arange(count)
    tensors["t2d"] = np.isin(np.arange(lm.config.vocab_size), IDS)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {n: np.ascontiguousarray(a) for n, a in tensors.items()}, folder / "model.safetensors"
    )
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "draft_vocab_size": count, "norm_before_residual": before,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}},
        "transformer_layer_config": {
            "model_type": kind, "hidden_size": width, "num_attention_heads": heads,
            "num_key_value_heads": remaining, "head_dim": head_width, "intermediate_size": inner,
            "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "vocab_size": lm.config.vocab_size, "max_position_embeddings": 128,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tensors


def vectors_of(lm: Any, tokens: list[int], layers: tuple[int, ...]) -> Any:
    """The model's inner vectors [layers, tokens, width]."""
    engine = lm.engine
    branch = engine.open(tokens)
    at = frozenset(range(len(tokens)))
    visited = engine.look(branch, at=at, num_logits=1, deep=False).inside
    branch.release()
    return np.concatenate([part.residuals for part in visited], 1)[list(layers)]


def read_text(head: Any, lm: Any, tokens: list[int]) -> Any:
    context = head.context()
    count = len(tokens) - 1
    vectors = vectors_of(lm, tokens[:-1], head.layers)
    context.read(np.arange(count), vectors, tokens[1:])
    return context
