"""Causal transformer families, as tables. See also `files/family_settings.py`."""

from __future__ import annotations

from typing import Any

from unspool.model.families.family import (
    ATTENTION,
    BIASES,
    ENDS,
    FEED,
    IN_LAYER,
    NORMS_AFTER,
    NORMS_AROUND,
    NORMS_BEFORE,
    Family,
    experts,
    layer,
    llama_like,
    rules,
)
from unspool.model.weights import TensorRule

# -- Causal transformer families, as tables. What a table cannot express is in `today_config.py`

_EXPERTS = {
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
    "normalize_experts": "norm_topk_prob",
}
# Weights that only Gemma 4 has in a layer -> their names in safetensors and in GGUF.
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


def _gemma4(column: int, in_layer: str, ends: str, gate_up_tensor: str) -> tuple[TensorRule, ...]:
    gate_up = ("layers.{i}.feed.experts.gate.weight", "layers.{i}.feed.experts.up.weight")
    return (
        *(TensorRule(ends + names[column], (weight,)) for weight, names in _GEMMA4_ENDS.items()),
        *(
            TensorRule(in_layer + n[column], (f"layers.{{i}}.{weight}",))
            for weight, n in _GEMMA4.items()
        ),
        TensorRule(in_layer + gate_up_tensor, gate_up),
    )


_GEMMA4_GGUF = (
    *_gemma4(1, "blk.{i}.", "", "ffn_gate_up_exps.weight"),
    TensorRule("blk.{i}.ffn_gate_exps.weight", ("layers.{i}.feed.experts.gate.weight",)),
    TensorRule("blk.{i}.ffn_up_exps.weight", ("layers.{i}.feed.experts.up.weight",)),
)

_GEMMA_KEYS = {
    **BIASES,
    "activation": "hidden_activation",
    "logit_softcap": "final_logit_softcapping",
}
_GEMMA_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
}
_GEMMA_READS = ("query_pre_attn_scalar", "use_bidirectional_attention")
_SLIDING_QWEN = {
    "max_window_layers": 28,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
}
_NUM_EXPERTS = {"num_experts": "num_local_experts"}

CAUSAL: tuple[Family, ...] = (
    llama_like("llama", "LlamaForCausalLM", keys={**BIASES, "ff_bias": "mlp_bias"}),
    llama_like(
        "mistral",
        "MistralForCausalLM",
        gguf="llama",
        defaults={
            "sliding_window": 4096,
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
        },
        reads=("layer_types",),  # such a file is taken for a Ministral
        window_layers="all",
    ),
    llama_like(
        "qwen2",
        "Qwen2ForCausalLM",
        defaults=_SLIDING_QWEN,
        fixed={"qkv_bias": True},
        reads=("max_window_layers",),
        window_layers="later",
        window_needs_switch=True,
    ),
    llama_like(
        "qwen3",
        "Qwen3ForCausalLM",
        keys=BIASES,
        defaults={**_SLIDING_QWEN, "head_dim": 128},
        fixed={"qk_norm": "head"},
        reads=("max_window_layers",),
        window_layers="later",
        window_needs_switch=True,
    ),
    llama_like(
        "gemma2",
        "Gemma2ForCausalLM",
        keys={**_GEMMA_KEYS, "attention_softcap": "attn_logit_softcapping"},
        defaults={
            **_GEMMA_DEFAULTS,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        only={"use_bidirectional_attention": False},
        fixed={"norm_plus_one": True, "norm_after": True},
        reads=("query_pre_attn_scalar",),
        window_layers="every second",
        rules=rules(ENDS, ATTENTION, NORMS_AROUND, FEED),
    ),
    llama_like(
        "gemma3",
        "Gemma3ForCausalLM",
        model_type="gemma3_text",
        keys=_GEMMA_KEYS,
        defaults={
            **_GEMMA_DEFAULTS,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10000.0,
            "max_position_embeddings": 131072,
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "final_logit_softcapping": None,
        },
        fixed={"norm_plus_one": True, "norm_after": True, "qk_norm": "head"},
        reads=(*_GEMMA_READS, "sliding_window_pattern", "rope_local_base_freq"),
        rotary_by_kind=True,
        window_layers="five of six",
        rules=rules(ENDS, ATTENTION, NORMS_AROUND, FEED),
    ),
    llama_like(
        "phi3",
        "Phi3ForCausalLM",
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
        },
        reads=("partial_rotary_factor",),
        window_layers="all",
        rules=rules(
            ENDS,
            layer(IN_LAYER + "self_attn.qkv_proj", "attention.q", "attention.k", "attention.v"),
            layer(IN_LAYER + "self_attn.o_proj", "attention.out"),
            layer(IN_LAYER + "mlp.gate_up_proj", "feed.gate", "feed.up"),
            layer(IN_LAYER + "mlp.down_proj", "feed.down"),
            NORMS_BEFORE,
        ),
    ),
    llama_like(
        "olmo2",
        "Olmo2ForCausalLM",
        keys=BIASES,
        defaults={"rms_norm_eps": 1e-5},
        fixed={"norm_before": False, "norm_after": True, "qk_norm": "whole"},
        rules=rules(ENDS, ATTENTION, NORMS_AFTER, FEED),
    ),
    llama_like(
        "smollm3",
        "SmolLM3ForCausalLM",
        keys={**BIASES, "ff_bias": "mlp_bias"},
        defaults={
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "use_sliding_window": False,
        },
        reads=("no_rope_layers", "no_rope_layer_interval"),
        window_layers="unrotated",
        window_needs_switch=True,
    ),
    llama_like(
        "mixtral",
        "MixtralForCausalLM",
        gguf="llama",
        keys={
            "experts": "num_local_experts",
            "experts_per_token": "num_experts_per_tok",
            "expert_width": "intermediate_size",
        },
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
        },
        other_names=_NUM_EXPERTS,
        window_layers="all",
        rules=rules(ENDS, ATTENTION, NORMS_BEFORE, experts("block_sparse_moe", "w1", "w3", "w2")),
    ),
    llama_like(
        "qwen3-moe",
        "Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        gguf="qwen3moe",
        keys={
            **BIASES,
            "experts": "num_experts",
            "experts_per_token": "num_experts_per_tok",
            "expert_width": "moe_intermediate_size",
            "normalize_experts": "norm_topk_prob",
        },
        defaults={
            "norm_topk_prob": False,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "moe_intermediate_size": 768,
            "intermediate_size": 6144,
            "decoder_sparse_step": 1,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "max_position_embeddings": 32768,
        },
        fixed={"qk_norm": "head"},
        reads=("decoder_sparse_step", "mlp_only_layers"),
        other_names={"num_local_experts": "num_experts"},
        window_layers="all",
        window_needs_switch=True,
        rules=rules(
            ENDS,
            ATTENTION,
            NORMS_BEFORE,
            FEED,  # for layers without experts; their names come first in those
            experts("mlp", "gate_proj", "up_proj", "down_proj"),
        ),
    ),
    Family(
        name="gpt2",
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        gguf="gpt2",
        keys={
            "vocab_size": "vocab_size",
            "width": "n_embd",
            "layers": "n_layer",
            "heads": "n_head",
            "ff_width": "n_inner",
            "context": "n_positions",
            "norm_eps": "layer_norm_epsilon",
            "activation": "activation_function",
            "tied": "tie_word_embeddings",
        },
        defaults={
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
            "n_positions": 1024,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
        reads=("scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
        other_names={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        fixed={
            "norm": "layer",
            "positions": "learned",
            "gated": False,
            "qkv_bias": True,
            "out_bias": True,
            "ff_bias": True,
        },
        prefixes=("transformer.", ""),
        rules=rules(
            (
                TensorRule("{p}wte.weight", ("embed.weight",)),
                TensorRule("{p}wpe.weight", ("position_embed.weight",)),
                TensorRule("{p}ln_f.weight", ("norm.weight",)),
                TensorRule("{p}ln_f.bias", ("norm.bias",)),
                TensorRule("lm_head.weight", ("head.weight",)),
            ),
            layer("{p}h.{i}.ln_1", "attention_norm"),
            layer(
                "{p}h.{i}.attn.c_attn",
                "attention.q",
                "attention.k",
                "attention.v",
                layout="transposed",
            ),
            layer("{p}h.{i}.attn.c_proj", "attention.out", layout="transposed"),
            layer("{p}h.{i}.ln_2", "feed_norm"),
            layer("{p}h.{i}.mlp.c_fc", "feed.up", layout="transposed"),
            layer("{p}h.{i}.mlp.c_proj", "feed.down", layout="transposed"),
        ),
    ),
    Family(
        name="gpt-neox",
        model_type="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        gguf="gptneox",
        keys={
            "vocab_size": "vocab_size",
            "width": "hidden_size",
            "layers": "num_hidden_layers",
            "heads": "num_attention_heads",
            "ff_width": "intermediate_size",
            "context": "max_position_embeddings",
            "norm_eps": "layer_norm_eps",
            "activation": "hidden_act",
            "tied": "tie_word_embeddings",
            "parallel": "use_parallel_residual",
            "qkv_bias": "attention_bias",
            "out_bias": "attention_bias",
        },
        defaults={
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "tie_word_embeddings": False,
            "use_parallel_residual": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
        },
        reads=("partial_rotary_factor",),
        other_names={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
        fixed={"norm": "layer", "gated": False, "ff_bias": True},
        prefixes=("gpt_neox.", ""),
        rules=rules(
            (
                TensorRule("{p}embed_in.weight", ("embed.weight",)),
                TensorRule("{p}final_layer_norm.weight", ("norm.weight",)),
                TensorRule("{p}final_layer_norm.bias", ("norm.bias",)),
                TensorRule("embed_out.weight", ("head.weight",)),
                TensorRule("lm_head.weight", ("head.weight",)),
            ),
            NORMS_BEFORE,
            layer(
                IN_LAYER + "attention.query_key_value",
                "attention.q",
                "attention.k",
                "attention.v",
                layout="per_head",
            ),
            layer(IN_LAYER + "attention.dense", "attention.out"),
            layer(IN_LAYER + "mlp.dense_h_to_4h", "feed.up"),
            layer(IN_LAYER + "mlp.dense_4h_to_h", "feed.down"),
        ),
    ),
    llama_like(
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
    llama_like(
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
    llama_like(
        "olmo3",
        "Olmo3ForCausalLM",
        gguf="olmo2",
        keys=BIASES,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
        fixed={"norm_before": False, "norm_after": True, "qk_norm": "whole"},
        rotary_by_kind=True,
        window_layers="three of four",
        rules=rules(ENDS, ATTENTION, NORMS_AFTER, FEED),
    ),
    llama_like(
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
            ENDS, ATTENTION, NORMS_BEFORE, FEED, experts("mlp", "gate_proj", "up_proj", "down_proj")
        ),
    ),
    llama_like(
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
    llama_like(
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
            ENDS, ATTENTION, NORMS_AROUND, FEED, _gemma4(0, IN_LAYER, "{p}", "experts.gate_up_proj")
        ),
        gguf_rules=_GEMMA4_GGUF,
    ),
)

# Multimodal model types whose language model is of another family: that family's name, other
# defaults, and other differences.
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


# -- gpt-oss: attention sinks, a sliding window in every second layer, and experts in MXFP4

_EXPERT_TENSORS = IN_LAYER + "mlp.experts."
_SIDES = ("layers.{i}.feed.gate", "layers.{i}.feed.up")
_WEIGHTS = tuple(f"{side}.weight" for side in _SIDES)
_BIASES = tuple(f"{side}.bias" for side in _SIDES)

GPT_OSS = llama_like(
    "gpt-oss",
    "GptOssForCausalLM",
    model_type="gpt_oss",
    keys={
        "qkv_bias": "attention_bias",
        "out_bias": "attention_bias",
        "experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_width": "intermediate_size",
        "activation_limit": "swiglu_limit",
    },
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "num_key_value_heads": 8,
        "rope_theta": 150000.0,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    other_names={"num_experts": "num_local_experts"},
    only={"swiglu_alpha": 1.702},
    fixed={"sinks": True, "router_bias": True, "expert_bias": True, "activation": "swiglu_clamped"},
    window_layers="every second",
    gguf_rules=(
        # llama.cpp's name of the norm before the experts, which differs from most families.
        *layer("blk.{i}.post_attention_norm", "feed_norm"),
        TensorRule("blk.{i}.attn_sinks.weight", ("layers.{i}.attention.sinks",)),
    ),
    rules=rules(
        ENDS,
        ATTENTION,
        NORMS_BEFORE,
        (TensorRule(IN_LAYER + "self_attn.sinks", ("layers.{i}.attention.sinks",)),),
        layer(IN_LAYER + "mlp.router", "feed.router"),
        (
            TensorRule(_EXPERT_TENSORS + "gate_up_proj", _WEIGHTS, "pairs_transposed"),
            TensorRule(_EXPERT_TENSORS + "gate_up_proj_blocks", _WEIGHTS, "pairs"),
            TensorRule(_EXPERT_TENSORS + "gate_up_proj_bias", _BIASES, "pairs"),
            TensorRule(
                _EXPERT_TENSORS + "down_proj", ("layers.{i}.feed.down.weight",), "transposed"
            ),
            TensorRule(_EXPERT_TENSORS + "down_proj_blocks", ("layers.{i}.feed.down.weight",)),
            TensorRule(_EXPERT_TENSORS + "down_proj_bias", ("layers.{i}.feed.down.bias",)),
        ),
    ),
)
