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


def named(name: str, **changes: Any) -> Callable[[], Any]:
    def build() -> Any:
        import transformers

        texts = ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")
        config_name = f"{name}Text" if name in texts else name
        config = getattr(transformers, f"{config_name}Config")(**{**_SHAPE, **changes})
        config._attn_implementation = "eager"  # the one implementation that knows soft-capping
        model_name = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
        return getattr(transformers, model_name)(config)

    return build


def _rope(kind: str, **extra: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **extra}}


_GPT_OSS: dict[str, Any] = {
    "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2,
    **_rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=8.0, truncate=False),
}  # fmt: skip

FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": named("GPT2", n_embd=48, n_layer=4, n_head=6, n_positions=128),
    "llama": named("Llama"),
    "llama-tied-bias": named(
        "Llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=12
    ),
    "llama-linear": named("Llama", **_rope("linear", factor=4.0)),
    "llama-dynamic": named("Llama", **_rope("dynamic", factor=4.0)),
    "llama-yarn": named("Llama", **_rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-llama3": named(
        "Llama",
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "mistral": named("Mistral", sliding_window=7),
    "qwen2": named("Qwen2"),
    "qwen2-window": named("Qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=2),
    "qwen3": named("Qwen3", head_dim=16, tie_word_embeddings=True),
    "gemma2": named("Gemma2", head_dim=16, sliding_window=7, query_pre_attn_scalar=20),
    "gemma2-file": named("Gemma2", head_dim=16, sliding_window=7, query_pre_attn_scalar=16),
    "gemma3": named(
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
    "phi3": named("Phi3", sliding_window=9),
    "phi3-longrope": named(
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
    "gpt-neox": named("GPTNeoX", rotary_pct=0.5),
    "gpt-neox-sequential": named("GPTNeoX", use_parallel_residual=False),
    "olmo2": named("Olmo2"),
    "smollm3": named("SmolLM3"),
    "mixtral": named("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": named(
        "Qwen3Moe",
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "gpt-oss": named("GptOss", **_GPT_OSS, sliding_window=7, swiglu_limit=1.5),
    "gpt-oss-file": named("GptOss", **_GPT_OSS, sliding_window=7),
}


def _vision(name: str, text: dict[str, Any], **changes: Any) -> Callable[[], Any]:
    """A multimodal model; only its language model is used."""

    def build() -> Any:
        import transformers

        config = getattr(transformers, f"{name}Config")(
            text_config={**_SHAPE, "head_dim": 8, **text}, **changes
        )
        config._attn_implementation = "eager"
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return build


_QWEN_EYES = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48,
    "num_position_embeddings": 4, "patch_size": 2, "deepstack_visual_indexes": [0],
}  # fmt: skip
_MROPE = _rope("default", mrope_section=[2, 1, 1])
_KINDS = {"s": "sliding_attention", "f": "full_attention"}
_PER_KIND = {
    "full_attention": {
        "rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip


def _kinds(word: str) -> dict[str, Any]:
    return {"layer_types": [_KINDS[kind] for kind in word], "num_hidden_layers": len(word)}


def _gemma4(word: str, **changes: Any) -> Callable[[], Any]:
    """Layers by one letter each, s with a window and f without."""
    usual = {
        "head_dim": 8, "global_head_dim": 16, "sliding_window": 7,
        "vocab_size_per_layer_input": 259, "hidden_size_per_layer_input": 0,
    }  # fmt: skip
    return named("Gemma4", **{**usual, **_kinds(word), **changes})


# Families of 2025 and 2026, and the corners of their settings. Our GPU kernels do not run them yet.
TODAY: dict[str, Callable[[], Any]] = {
    "ministral3": named(
        "Ministral3",
        head_dim=12,
        **_rope(
            "yarn",
            factor=16.0,
            original_max_position_embeddings=8,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.3,
        ),
    ),
    "mistral3": _vision(
        "Mistral3",
        {"model_type": "mistral", "sliding_window": None},
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "intermediate_size": 16,
            "image_size": 8,
            "patch_size": 4,
        },
        tie_word_embeddings=False,
    ),
    "qwen3-vl": _vision("Qwen3VL", _MROPE, vision_config=_QWEN_EYES, tie_word_embeddings=True),
    "qwen3-vl-moe": _vision(
        "Qwen3VLMoe",
        {**_MROPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
        vision_config=_QWEN_EYES,
    ),
    "qwen2.5-vl": _vision(
        "Qwen2_5_VL",
        _MROPE,
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 48,
            "patch_size": 2,
        },
    ),
    "granite": named(
        "Granite",
        embedding_multiplier=12.0,
        attention_multiplier=0.2,
        residual_multiplier=0.22,
        logits_scaling=3.0,
        mlp_bias=True,
    ),
    "olmo3": named("Olmo3", sliding_window=7, rope_parameters=_PER_KIND, **_kinds("sssfs")),
    "mellum": named(
        "Mellum",
        head_dim=12,
        sliding_window=7,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        rope_parameters=_PER_KIND,
        **_kinds("sffs"),
    ),
    "gemma": named("Gemma", head_dim=16),
    "gemma4-shared": _gemma4(  # E2B and E4B
        "ssfsfsfsf",
        num_kv_shared_layers=4,
        hidden_size_per_layer_input=12,
        use_double_wide_mlp=True,
        final_logit_softcapping=3.0,
    ),
    "gemma4-dense": _gemma4(  # 31B
        "sfsf", attention_k_eq_v=True, num_global_key_value_heads=1
    ),
    "gemma4-experts": _gemma4(  # 26B-A4B
        "ssf",
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=20,
    ),
    "gemma4-all": _gemma4(
        "fsfsfsf",
        attention_k_eq_v=True,
        num_global_key_value_heads=3,
        num_kv_shared_layers=3,
        hidden_size_per_layer_input=12,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=3,
        moe_intermediate_size=20,
    ),
}


# Together they have all that no family before them has.
NEWEST = ("ministral3", "granite", "gemma4-all")


def make(name: str, seed: int = 0) -> Any:
    """A random model of the family, its norms and biases random too, so that none is a no-op."""
    torch.manual_seed(seed)
    from helpers import tiny_recurrent

    return filled({**FAMILIES, **TODAY, **tiny_recurrent.FAMILIES}[name]())


def filled(model: Any) -> Any:
    """A model with random numbers in all of its parameters."""
    model = model.eval().float()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.2)
            if name.endswith(("expert_bias", "score_correction_bias")):  # which experts are chosen
                buffer.add_(torch.randn_like(buffer) * 0.2)
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
