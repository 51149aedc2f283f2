"""Tiny random checkpoints of the families whose tokens look ahead, each with its oracle.

Diffusion models are Llamas and Qwens in other clothes: their oracle is transformers' own model
under a mask of four dimensions. BERT and its kin look both ways in transformers too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from helpers import tiny

MASK = 257
BLOCK = 8

Logits = Callable[[Any], torch.Tensor]  # of tokens [1, length]


@dataclass(frozen=True)
class Masked:
    """One family: which model of transformers it is, and what its files say of it."""

    build: Callable[[], Any]
    expected: dict[str, Any]  # of the config
    settings: dict[str, Any] | None = None  # what config.json says instead; None: as it was saved
    rename: Callable[[str], str] = field(default=lambda name: name)

    @property
    def is_bert(self) -> bool:
        return self.settings is None


def _llada(name: str) -> str:
    """LLaDA's names for a Llama's tensors."""
    for reference, own_path in {
        "model.embed_tokens": "wte",
        "model.norm": "ln_f",
        "lm_head": "ff_out",
        "model.layers": "blocks",
        "self_attn.o_proj": "attn_out",
        "self_attn.": "",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm",
        "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
    }.items():
        name = name.replace(reference, own_path)
    return f"model.transformer.{name}"


LLADA_CONFIG = {
    "model_type": "llada",
    "architectures": ["LLaDAModelLM"],
    "activation_type": "silu",
    "alibi": False,
    "block_type": "llama",
    "d_model": 48,
    "embedding_size": 259,
    "eos_token_id": 2,
    "include_bias": False,
    "include_qkv_bias": False,
    "layer_norm_type": "rms",
    "mask_token_id": MASK,
    "max_sequence_length": 128,
    "mlp_hidden_size": 80,
    "multi_query_attention": None,
    "n_heads": 6,
    "n_kv_heads": 2,
    "n_layers": 4,
    "rms_norm_eps": 1e-6,
    "rope": True,
    "rope_theta": 10000.0,
    "vocab_size": 250,
    "weight_tying": False,
}


def _qwen(base: str, expected: dict[str, Any], **settings: Any) -> Masked:
    return Masked(tiny.FAMILIES[base], expected, {"mask_token_id": MASK, **settings})


_QWEN_WHOLE = {"sight": "whole", "block": 0, "mask_id": MASK}
_QWEN_BLOCK = {"sight": "block", "block": BLOCK, "mask_id": MASK}
_SMALL = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 130,
}
_LONG = {"max_position_embeddings": 2048}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1}
_TOKENS |= {"eos_token_id": 2, "sep_token_id": 2}
_BERT = {"sight": "whole", "norm_sums": True, "head_transform": True}


def _bert(name: str, **changes: Any) -> Callable[[], Any]:
    def build() -> Any:
        import transformers

        config = getattr(transformers, f"{name}Config")(**{**_SMALL, **changes})
        config._attn_implementation = "eager"
        return getattr(transformers, f"{name}ForMaskedLM")(config)

    return build


FAMILIES: dict[str, Masked] = {
    "llada": Masked(
        tiny.FAMILIES["llama"], {**_QWEN_WHOLE, "shifted": False}, LLADA_CONFIG, _llada
    ),
    "dream": _qwen(
        "qwen2",
        {**_QWEN_WHOLE, "shifted": True},
        model_type="Dream",
        architectures=["DreamModel"],  # by this llama.cpp's converter knows it
    ),
    "sdar": _qwen("qwen3", {**_QWEN_BLOCK, "shifted": False}, model_type="sdar", block_size=BLOCK),
    "fast_dllm_qwen": _qwen(
        "qwen2", {**_QWEN_BLOCK, "shifted": True}, model_type="Fast_dLLM_Qwen", bd_size=BLOCK
    ),
    "a2d-qwen3": _qwen("qwen3", {**_QWEN_WHOLE, "shifted": False}, model_type="a2d-qwen3"),
    "a2d-qwen3-bd3lm": _qwen(
        "qwen3", {**_QWEN_BLOCK, "shifted": False}, model_type="a2d-qwen3", block_size=BLOCK
    ),
    "a2d-qwen2": _qwen("qwen2", {**_QWEN_WHOLE, "shifted": False}, model_type="a2d-qwen2"),
    "bert": Masked(_bert("Bert", type_vocab_size=2, pad_token_id=0), {**_BERT, "context": 130}),
    "bert-untied": Masked(
        _bert("Bert", tie_word_embeddings=False, hidden_act="relu", pad_token_id=0),
        {**_BERT, "tied": False},
    ),
    "roberta": Masked(
        _bert("Roberta", layer_norm_eps=1e-5, pad_token_id=1), {**_BERT, "context": 128}
    ),
    "distilbert": Masked(
        _bert("DistilBert", dim=48, n_layers=4, n_heads=6, hidden_dim=80, pad_token_id=0), _BERT
    ),
    "modernbert": Masked(
        _bert("ModernBert", local_attention=10, num_hidden_layers=5, **_LONG, **_TOKENS),
        {"sight": "whole", "windows": (0, 6, 6, 0, 6), "norm_bias": False, "tied": True},
    ),
    "modernbert-biases": Masked(
        _bert(
            "ModernBert",
            local_attention=6,
            global_attn_every_n_layers=2,
            decoder_bias=False,
            **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True),
            **_TOKENS,
        ),
        {"windows": (0, 4, 0, 4), "head_bias": False, "head_transform_bias": True},
    ),
}


def save(name: str, folder: Path) -> Logits:
    """Write a family's checkpoint as its makers do, and give what its logits must be."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = tiny.filled(family.build())
    model.save_pretrained(folder)
    if family.settings is not None:
        weights = load_file(folder / "model.safetensors")
        renamed = {family.rename(key): tensor for key, tensor in weights.items()}
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
        saved = {} if name == "llada" else json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**saved, **family.settings}))

    @torch.no_grad()
    def logits(tokens: torch.Tensor) -> torch.Tensor:
        if family.is_bert:
            return model(tokens).logits
        mask = hidden(ends(family.expected, tokens.shape[1]))
        return model(tokens, attention_mask=mask).logits

    return logits


def ends(expected: dict[str, Any], length: int) -> Any:
    """End of the visible range of each of `length` tokens."""
    if expected["sight"] == "whole":
        return np.full(length, length)
    return np.minimum((np.arange(length) // expected["block"] + 1) * expected["block"], length)


def hidden(visible_end: Any) -> torch.Tensor:
    """transformers' mask for that."""
    length = len(visible_end)
    unseen = np.arange(length)[None, :] >= visible_end[:, None]
    return torch.zeros(1, 1, length, length).masked_fill(torch.from_numpy(unseen), -1e30)
