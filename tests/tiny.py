"""Tiny random checkpoints of every family, made with transformers: the oracle for parity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Shapes small enough to be quick, odd enough that mixed-up axes cannot go unnoticed.
_SHAPE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _named(name: str, **changes: Any) -> Callable[[], Any]:
    def build() -> Any:
        import transformers

        config_name = {"Gemma3": "Gemma3Text"}.get(name, name)
        config = getattr(transformers, f"{config_name}Config")(**{**_SHAPE, **changes})
        config._attn_implementation = "eager"  # the one implementation that knows soft-capping
        model_name = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
        return getattr(transformers, model_name)(config)

    return build


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


_GPT_OSS: dict[str, Any] = {
    "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2,
    **_rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=8.0, truncate=False),
}  # fmt: skip

FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": _named("GPT2", n_embd=48, n_layer=4, n_head=6, n_positions=128),
    "llama": _named("Llama"),
    "llama-tied-bias": _named(
        "Llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=12
    ),
    "llama-linear": _named("Llama", **_rope("linear", factor=4.0)),
    "llama-dynamic": _named("Llama", **_rope("dynamic", factor=4.0)),
    "llama-yarn": _named("Llama", **_rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-llama3": _named(
        "Llama",
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "mistral": _named("Mistral", sliding_window=7),
    "qwen2": _named("Qwen2"),
    "qwen2-window": _named("Qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=2),
    "qwen3": _named("Qwen3", head_dim=16, tie_word_embeddings=True),
    "gemma2": _named("Gemma2", head_dim=16, sliding_window=7, query_pre_attn_scalar=20),
    "gemma2-file": _named("Gemma2", head_dim=16, sliding_window=7, query_pre_attn_scalar=16),
    "gemma3": _named(
        "Gemma3",
        tie_word_embeddings=True,
        num_hidden_layers=7,
        head_dim=16,
        sliding_window=7,
        query_pre_attn_scalar=16,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "phi3": _named("Phi3", sliding_window=9),
    "phi3-longrope": _named(
        "Phi3",
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.25],
            "long_factor": [2.0, 5.0],
            "original_max_position_embeddings": 32,
        },
    ),
    "gpt-neox": _named("GPTNeoX", rotary_pct=0.5),
    "gpt-neox-sequential": _named("GPTNeoX", use_parallel_residual=False),
    "olmo2": _named("Olmo2"),
    "smollm3": _named("SmolLM3"),
    "mixtral": _named("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": _named(
        "Qwen3Moe",
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "gpt-oss": _named("GptOss", **_GPT_OSS, sliding_window=7, swiglu_limit=1.5),
    "gpt-oss-file": _named("GptOss", **_GPT_OSS, sliding_window=7),
}


def make(name: str, seed: int = 0) -> Any:
    """A random model of the family, its norms and biases random too, so that none is a no-op."""
    torch.manual_seed(seed)
    return filled(FAMILIES[name]())


def filled(model: Any) -> Any:
    """A model with random numbers in all of its parameters."""
    model = model.eval().float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embed" in parameter_name or "wte" in parameter_name:
                parameter.copy_(torch.randn_like(parameter) * 0.5)
            else:
                parameter.copy_(torch.randn_like(parameter) * (1.5 / parameter.shape[-1] ** 0.5))
    return model


def save(name: str, folder: Path, **options: Any) -> Any:
    """Write the family's checkpoint into `folder` and give back the transformers model."""
    model = make(name)
    model.save_pretrained(folder, **options)
    return model
