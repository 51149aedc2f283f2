"""Families of 2025 and 2026, as tables; what needs more than a table is in `today_config.py`."""

from __future__ import annotations

from typing import Any

from unspool.model.family import BIASES, Family, like_llama
from unspool.model.tensor_names import (
    ATTENTION,
    ENDS,
    FEED,
    IN_LAYER,
    NORMS_AFTER,
    NORMS_AROUND,
    NORMS_BEFORE,
    experts,
    rules,
)
from unspool.model.weights import Rule

_EXPERTS = {
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
    "normalize_experts": "norm_topk_prob",
}
# What Gemma 4 has in a layer beside the others: ours, in a folder, in a GGUF file.
_GEMMA4 = {
    "feed.dense_norm.weight": ("pre_feedforward_layernorm.weight", "ffn_norm.weight"),
    "feed.dense_post_norm.weight": (
        "post_feedforward_layernorm_1.weight", "post_ffw_norm_1.weight",
    ),
    "feed.experts_norm.weight": ("pre_feedforward_layernorm_2.weight", "pre_ffw_norm_2.weight"),
    "feed.experts_post_norm.weight": (
        "post_feedforward_layernorm_2.weight", "post_ffw_norm_2.weight",
    ),
    "feed.router_norm.weight": ("router.scale", "ffn_gate_inp.scale"),
    "feed.expert_scale": ("router.per_expert_scale", "ffn_down_exps.scale"),
    "feed.experts.router.weight": ("router.proj.weight", "ffn_gate_inp.weight"),
    "feed.experts.down.weight": ("experts.down_proj", "ffn_down_exps.weight"),
    "feed.dense.gate.weight": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "feed.dense.up.weight": ("mlp.up_proj.weight", "ffn_up.weight"),
    "feed.dense.down.weight": ("mlp.down_proj.weight", "ffn_down.weight"),
    "token_input.gate.weight": ("per_layer_input_gate.weight", "inp_gate.weight"),
    "token_input.out.weight": ("per_layer_projection.weight", "proj.weight"),
    "token_input.norm.weight": ("post_per_layer_input_norm.weight", "post_norm.weight"),
    "scale": ("layer_scalar", "layer_output_scale.weight"),
}  # fmt: skip
_GEMMA4_ENDS = {
    "token_inputs.embed.weight": ("embed_tokens_per_layer.weight", "per_layer_token_embd.weight"),
    "token_inputs.project.weight": (
        "per_layer_model_projection.weight", "per_layer_model_proj.weight",
    ),
    "token_inputs.norm.weight": ("per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
}  # fmt: skip


def _gemma4(place: int, in_layer: str, ends: str, both: str) -> tuple[Rule, ...]:
    gate_up = ("layers.{i}.feed.experts.gate.weight", "layers.{i}.feed.experts.up.weight")
    return (
        *(Rule(ends + theirs[place], (ours,)) for ours, theirs in _GEMMA4_ENDS.items()),
        *(Rule(in_layer + n[place], (f"layers.{{i}}.{ours}",)) for ours, n in _GEMMA4.items()),
        Rule(in_layer + both, gate_up),
    )


_GEMMA4_GGUF = (
    *_gemma4(1, "blk.{i}.", "", "ffn_gate_up_exps.weight"),
    Rule("blk.{i}.ffn_gate_exps.weight", ("layers.{i}.feed.experts.gate.weight",)),
    Rule("blk.{i}.ffn_up_exps.weight", ("layers.{i}.feed.experts.up.weight",)),
)

TODAY: tuple[Family, ...] = (
    like_llama(
        "ministral3",
        "Ministral3ForCausalLM",
        gguf="mistral3",
        defaults={
            "rms_norm_eps": 1e-5,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rope_theta": 1_000_000.0,
            "max_position_embeddings": 262_144,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        window_layers="all",
    ),
    like_llama(
        "granite",
        "GraniteForCausalLM",
        keys={
            **BIASES,
            "ff_bias": "mlp_bias",
            "embedding_scale": "embedding_multiplier",
            "attention_scale": "attention_multiplier",
            "residual_scale": "residual_multiplier",
        },
        defaults={
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        reads=("logits_scaling",),
    ),
    like_llama(
        "olmo3",
        "Olmo3ForCausalLM",
        gguf="olmo2",
        keys=BIASES,
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "sliding_window": 4096,
        },
        fixed={"norm_before": False, "norm_after": True, "qk_norm": "whole"},
        rotary_by_kind=True,
        window_layers="three of four",
        rules=rules(ENDS, ATTENTION, NORMS_AFTER, FEED),
    ),
    like_llama(
        "mellum",
        "MellumForCausalLM",
        keys={**BIASES, **_EXPERTS},
        defaults={
            "head_dim": 128,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_experts": 64,
            "moe_intermediate_size": 896,
            "intermediate_size": 7168,
            "num_key_value_heads": 4,
            "sliding_window": 1024,
            "max_position_embeddings": 131_072,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        fixed={"qk_norm": "head"},
        reads=("mlp_layer_types",),
        other_names={"num_local_experts": "num_experts"},
        rotary_reads=("rope_parameters",),
        rotary_by_kind=True,
        window_layers="listed",
        rules=rules(
            ENDS,
            ATTENTION,
            NORMS_BEFORE,
            FEED,
            experts("mlp", "gate_proj", "up_proj", "down_proj"),
        ),
    ),
    like_llama(
        "gemma",
        "GemmaForCausalLM",
        keys=BIASES,
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "head_dim": 256,
            "num_key_value_heads": 16,
            "max_position_embeddings": 8192,
        },
        only={"use_bidirectional_attention": False},
        fixed={"norm_plus_one": True},
    ),
    like_llama(
        "gemma4",
        "Gemma4ForCausalLM",
        model_type="gemma4_text",
        keys={
            **BIASES,
            "activation": "hidden_activation",
            "logit_softcap": "final_logit_softcapping",
            "kv_shared": "num_kv_shared_layers",
            "token_width": "hidden_size_per_layer_input",
        },
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_key_value_heads": 4,
            "sliding_window": 512,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 256,
            "max_position_embeddings": 131_072,
            "vocab_size_per_layer_input": 262_144,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1_000_000.0,
                },
            },
        },
        fixed={
            "norm_after": True,
            "qk_norm": "head",
            "value_norm": True,
            "attention_scale": 1.0,
            "layer_scale": True,
        },
        reads=(
            "per_layer_config",
            "global_head_dim",
            "num_global_key_value_heads",
            "attention_k_eq_v",
            "use_bidirectional_attention",
            "vocab_size_per_layer_input",
            "use_double_wide_mlp",
            "enable_moe_block",
            "num_experts",
            "top_k_experts",
            "moe_intermediate_size",
        ),
        rotary_reads=("rope_parameters",),
        rotary_by_kind=True,
        window_layers="five of six",
        rules=rules(
            ENDS,
            ATTENTION,
            NORMS_AROUND,
            FEED,
            _gemma4(0, IN_LAYER, "{p}", "experts.gate_up_proj"),
        ),
        gguf_rules=_GEMMA4_GGUF,
    ),
)

# Types of models that are another family once their pictures are left out, what those say by
# their silence, and where else they differ from that family.
Alias = tuple[str, dict[str, Any], dict[str, Any]]
_NO_WINDOWS = {"window_layers": "", "window_needs_switch": False, "reads": ()}
_QWEN2_VL: Alias = (
    "qwen2",
    {
        "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "num_key_value_heads": 8,
        "max_window_layers": 80,
    },
    {},
)  # fmt: skip
_QWEN3_VL: Alias = (
    "qwen3", {"rope_theta": 500_000.0, "max_position_embeddings": 128_000}, _NO_WINDOWS,
)  # fmt: skip
_QWEN3_VL_MOE: Alias = (
    "qwen3-moe",
    {
        "rope_theta": 500_000.0, "max_position_embeddings": 128_000, "norm_topk_prob": True,
        "num_experts_per_tok": 4, "num_experts": 60, "moe_intermediate_size": 1408,
        "num_key_value_heads": 16, "intermediate_size": 5632, "tie_word_embeddings": True,
        "head_dim": None,
    },
    {**_NO_WINDOWS, "reads": ("decoder_sparse_step", "mlp_only_layers")},
)  # fmt: skip
_GEMMA4_UNIFIED: Alias = (
    "gemma4", {
        "sliding_window": 1024, "max_position_embeddings": 262_144,
        "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision",
    },
    {},
)  # fmt: skip
ALIASES: dict[str, Alias] = {
    "gemma3": ("gemma3", {}, {}),
    "gemma4": ("gemma4", {}, {}),
    "gemma4_unified": _GEMMA4_UNIFIED,
    "gemma4_unified_text": _GEMMA4_UNIFIED,
    "qwen3_5": ("qwen3.5", {}, {}),
    "qwen3_5_moe": ("qwen3.5-moe", {}, {}),
    "mistral3": ("mistral", {"sliding_window": None}, {}),
    "qwen2_vl": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_text": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL_MOE,
    "qwen3_vl_moe_text": _QWEN3_VL_MOE,
}
GGUF_ALIASES = {
    "qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3-moe",
    "nemotron_h_moe": "nemotron-h",
}  # fmt: skip
