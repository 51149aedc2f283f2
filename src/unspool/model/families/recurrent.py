"""Families with recurrent layers, as tables."""

from __future__ import annotations

from unspool.model.families.family import (
    ATTENTION,
    BIASES,
    ENDS,
    FEED,
    IN_LAYER,
    NORMS_BEFORE,
    experts,
    layer,
    llama_like,
    rules,
)
from unspool.model.weights import TensorRule

_CONV_KEYS = {"norm_eps": "norm_eps"}
_CONV_DEFAULTS = {
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 128_000,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
}
_CONV_READS = ("conv_L_cache", "layer_types", "tie_embedding")
_CONV_RULES = rules(
    (
        TensorRule("{p}embed_tokens.weight", ("embed.weight",)),
        TensorRule("{p}embedding_norm.weight", ("norm.weight",)),
        TensorRule("lm_head.weight", ("head.weight",)),
    ),
    layer(IN_LAYER + "operator_norm", "attention_norm"),
    layer(IN_LAYER + "ffn_norm", "feed_norm"),
    layer(IN_LAYER + "self_attn.q_proj", "attention.q"),
    layer(IN_LAYER + "self_attn.k_proj", "attention.k"),
    layer(IN_LAYER + "self_attn.v_proj", "attention.v"),
    layer(IN_LAYER + "self_attn.out_proj", "attention.out"),
    layer(IN_LAYER + "self_attn.q_layernorm", "attention.q_norm"),
    layer(IN_LAYER + "self_attn.k_layernorm", "attention.k_norm"),
    layer(IN_LAYER + "conv.in_proj", "mixer.b", "mixer.c", "mixer.x"),
    layer(IN_LAYER + "conv.conv", "mixer.conv", layout="channels"),
    layer(IN_LAYER + "conv.out_proj", "mixer.out"),
    layer(IN_LAYER + "feed_forward.w1", "feed.gate"),
    layer(IN_LAYER + "feed_forward.w3", "feed.up"),
    layer(IN_LAYER + "feed_forward.w2", "feed.down"),
)
_DELTA_DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
}
_DELTA_READS = (
    "partial_rotary_factor", "full_attention_interval", "layer_types", "linear_conv_kernel_dim",
    "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads",
)  # fmt: skip
_DELTA_ONLY = {"hidden_act": "silu"}  # also used by the recurrence
_DELTA_FIXED = {"norm_plus_one": True, "qk_norm": "head", "attention_gate": True}
_GATED_ATTENTION = rules(
    layer(IN_LAYER + "self_attn.q_proj", "attention.q", "attention.gate", layout="gated_heads"),
    layer(IN_LAYER + "self_attn.k_proj", "attention.k"),
    layer(IN_LAYER + "self_attn.v_proj", "attention.v"),
    layer(IN_LAYER + "self_attn.o_proj", "attention.out"),
    layer(IN_LAYER + "self_attn.q_norm", "attention.q_norm"),
    layer(IN_LAYER + "self_attn.k_norm", "attention.k_norm"),
)
_DELTA = rules(
    layer(IN_LAYER + "linear_attn.conv1d", "mixer.conv", layout="channels"),
    (
        TensorRule(IN_LAYER + "linear_attn.A_log", ("layers.{i}.mixer.a_log",)),
        TensorRule(IN_LAYER + "linear_attn.dt_bias", ("layers.{i}.mixer.dt_bias",)),
        TensorRule(IN_LAYER + "linear_attn.norm.weight", ("layers.{i}.mixer.norm_weight",)),
    ),
    layer(IN_LAYER + "linear_attn.out_proj", "mixer.out"),
)
_DELTA_INPUTS = rules(
    layer(IN_LAYER + "linear_attn.in_proj_qkv", "mixer.qkv"),
    layer(IN_LAYER + "linear_attn.in_proj_z", "mixer.z"),
    layer(IN_LAYER + "linear_attn.in_proj_b", "mixer.b"),
    layer(IN_LAYER + "linear_attn.in_proj_a", "mixer.a"),
)
_GROUPED_INPUTS = rules(  # Qwen3-Next: each key head has all that belongs to it together
    layer(IN_LAYER + "linear_attn.in_proj_qkvz", "mixer.qkv", "mixer.z", layout="grouped"),
    layer(IN_LAYER + "linear_attn.in_proj_ba", "mixer.b", "mixer.a", layout="grouped_values"),
)
_SHARED_KEYS = {
    **BIASES,
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
    "shared_width": "shared_expert_intermediate_size",
}
_SHARED_DEFAULTS = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "intermediate_size": 512,  # of layers without experts, of which there are none
}
_SHARED_EXPERTS = rules(
    experts("mlp", "gate_proj", "up_proj", "down_proj"),
    (
        TensorRule(
            IN_LAYER + "mlp.experts.gate_up_proj",
            ("layers.{i}.feed.gate.weight", "layers.{i}.feed.up.weight"),
        ),
        TensorRule(IN_LAYER + "mlp.experts.down_proj", ("layers.{i}.feed.down.weight",)),
    ),
    layer(IN_LAYER + "mlp.shared_expert.gate_proj", "feed.shared.gate"),
    layer(IN_LAYER + "mlp.shared_expert.up_proj", "feed.shared.up"),
    layer(IN_LAYER + "mlp.shared_expert.down_proj", "feed.shared.down"),
    layer(IN_LAYER + "mlp.shared_expert_gate", "feed.shared_gate"),
)

# GGUF tensor names that differ from those of other families.
_CONV_GGUF = (TensorRule("token_embd_norm.weight", ("norm.weight",)),)
_DELTA_GGUF = rules(
    layer("blk.{i}.post_attention_norm", "feed_norm", layout="plus_one"),
    layer("blk.{i}.ssm_conv1d", "mixer.conv", layout="channels"),
    layer("blk.{i}.ssm_out", "mixer.out"),
)
_GROUPED_GGUF = layer("blk.{i}.ssm_ba", "mixer.b", "mixer.a", layout="grouped_values")

RECURRENT = (
    llama_like(
        "lfm2",
        "Lfm2ForCausalLM",
        keys=_CONV_KEYS,
        defaults={
            **_CONV_DEFAULTS,
            "intermediate_size": 12288,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
        only={"conv_bias": False},
        fixed={"qk_norm": "head", "activation": "silu"},
        reads=(
            *_CONV_READS,
            "full_attn_idxs",
            "block_ff_dim",
            "block_auto_adjust_ff_dim",
            "block_ffn_dim_multiplier",
            "block_multiple_of",
        ),
        rules=_CONV_RULES,
        gguf_rules=_CONV_GGUF,
    ),
    llama_like(
        "lfm2-moe",
        "Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        gguf="lfm2moe",
        keys={
            **_CONV_KEYS,
            "experts": "num_experts",
            "experts_per_token": "num_experts_per_tok",
            "expert_width": "moe_intermediate_size",
            "normalize_experts": "norm_topk_prob",
            "selection_bias": "use_expert_bias",
            "experts_scale": "routed_scaling_factor",
        },
        defaults={
            **_CONV_DEFAULTS,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "intermediate_size": 7168,
        },
        only={"conv_bias": False},
        fixed={"qk_norm": "head", "router": "sigmoid", "activation": "silu"},
        reads=(*_CONV_READS, "num_dense_layers"),
        rules=rules(
            _CONV_RULES,
            experts("feed_forward", "w1", "w3", "w2"),
            (
                TensorRule(
                    IN_LAYER + "feed_forward.expert_bias", ("layers.{i}.feed.selection_bias",)
                ),
            ),
        ),
        gguf_rules=_CONV_GGUF,
    ),
    llama_like(
        "qwen3.5",
        "Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        gguf="qwen35",
        keys=BIASES,
        defaults={**_DELTA_DEFAULTS, "num_key_value_heads": 4, "intermediate_size": 12288},
        only=_DELTA_ONLY,
        fixed=_DELTA_FIXED,
        reads=_DELTA_READS,
        rules=rules(ENDS, _GATED_ATTENTION, _DELTA_INPUTS, _DELTA, NORMS_BEFORE, FEED),
        gguf_rules=_DELTA_GGUF,
    ),
    llama_like(
        "qwen3.5-moe",
        "Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        gguf="qwen35moe",
        keys=_SHARED_KEYS,
        defaults={
            **_DELTA_DEFAULTS,
            **_SHARED_DEFAULTS,
            "num_experts_per_tok": 8,
            "num_experts": 256,
        },
        only=_DELTA_ONLY,
        fixed=_DELTA_FIXED,
        reads=_DELTA_READS,
        rules=rules(ENDS, _GATED_ATTENTION, _DELTA_INPUTS, _DELTA, NORMS_BEFORE, _SHARED_EXPERTS),
        gguf_rules=_DELTA_GGUF,
    ),
    llama_like(
        "qwen3-next",
        "Qwen3NextForCausalLM",
        model_type="qwen3_next",
        gguf="qwen3next",
        keys={**_SHARED_KEYS, "normalize_experts": "norm_topk_prob"},
        defaults={
            **_DELTA_DEFAULTS,
            **_SHARED_DEFAULTS,
            "intermediate_size": 5632,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
        only=_DELTA_ONLY,
        fixed=_DELTA_FIXED,
        reads=(*_DELTA_READS, "decoder_sparse_step", "mlp_only_layers"),
        rules=rules(
            ENDS, _GATED_ATTENTION, _GROUPED_INPUTS, _DELTA, NORMS_BEFORE, FEED, _SHARED_EXPERTS
        ),
        gguf_rules=_DELTA_GGUF + _GROUPED_GGUF,
    ),
)


# -- Families with Mamba-2 layers, as tables


def _mamba(at: str) -> tuple[TensorRule, ...]:
    """Rules for the weights of a Mamba-2 layer under this module name."""
    names = {"A_log": "a_log", "D": "d", "dt_bias": "dt_bias", "norm.weight": "norm_weight"}
    return rules(
        layer(f"{IN_LAYER}{at}.in_proj", "mixer.z", "mixer.vkq", "mixer.dt"),
        layer(f"{IN_LAYER}{at}.conv1d", "mixer.conv", layout="channels"),
        tuple(
            TensorRule(f"{IN_LAYER}{at}.{file_name}", (f"layers.{{i}}.mixer.{weight}",))
            for file_name, weight in names.items()
        ),
        layer(f"{IN_LAYER}{at}.out_proj", "mixer.out"),
    )


_GRANITE_FEED = rules(  # a dense feed-forward, or a shared expert
    layer(IN_LAYER + "shared_mlp.input_linear", "feed.gate", "feed.up"),
    layer(IN_LAYER + "shared_mlp.output_linear", "feed.down"),
    layer(IN_LAYER + "shared_mlp.input_linear", "feed.shared.gate", "feed.shared.up"),
    layer(IN_LAYER + "shared_mlp.output_linear", "feed.shared.down"),
    layer(IN_LAYER + "block_sparse_moe.router.layer", "feed.router"),
    layer(IN_LAYER + "block_sparse_moe.input_linear", "feed.gate", "feed.up"),
    layer(IN_LAYER + "block_sparse_moe.output_linear", "feed.down"),
)
# Nemotron: every layer is either a token mixer or a feed-forward; both are called "mixer".
_IN_MIXER = IN_LAYER + "mixer."
_NEMOTRON = rules(
    (
        TensorRule("{p}embeddings.weight", ("embed.weight",)),
        TensorRule("{p}norm_f.weight", ("norm.weight",)),
        TensorRule("lm_head.weight", ("head.weight",)),
    ),
    layer(IN_LAYER + "norm", "attention_norm"),
    layer(IN_LAYER + "norm", "feed_norm"),
    _mamba("mixer"),
    layer(_IN_MIXER + "q_proj", "attention.q"),
    layer(_IN_MIXER + "k_proj", "attention.k"),
    layer(_IN_MIXER + "v_proj", "attention.v"),
    layer(_IN_MIXER + "o_proj", "attention.out"),
    layer(_IN_MIXER + "up_proj", "feed.up"),
    layer(_IN_MIXER + "down_proj", "feed.down"),
    layer(_IN_MIXER + "gate", "feed.router"),
    (TensorRule(_IN_MIXER + "gate.e_score_correction_bias", ("layers.{i}.feed.selection_bias",)),),
    layer(_IN_MIXER + "experts.{e}.up_proj", "feed.up"),
    layer(_IN_MIXER + "experts.{e}.down_proj", "feed.down"),
    (
        TensorRule(_IN_MIXER + "experts.up_proj", ("layers.{i}.feed.up.weight",)),  # all in one
        TensorRule(_IN_MIXER + "experts.down_proj", ("layers.{i}.feed.down.weight",)),
    ),
    layer(_IN_MIXER + "shared_experts.up_proj", "feed.shared.up"),
    layer(_IN_MIXER + "shared_experts.down_proj", "feed.shared.down"),
)

_GGUF = rules(
    layer("blk.{i}.ssm_in", "mixer.z", "mixer.vkq", "mixer.dt"),
    layer("blk.{i}.ssm_conv1d", "mixer.conv", layout="channels"),
    layer("blk.{i}.ssm_out", "mixer.out"),
    (
        TensorRule("blk.{i}.ssm_d", ("layers.{i}.mixer.d",), "flat"),
        TensorRule("blk.{i}.ssm_norm.weight", ("layers.{i}.mixer.norm_weight",), "flat"),
    ),
)

MAMBA = (
    llama_like(
        "granite-hybrid",
        "GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        gguf="granitehybrid",
        keys={
            **BIASES,
            "embedding_scale": "embedding_multiplier",
            "attention_scale": "attention_multiplier",
            "residual_scale": "residual_multiplier",
        },
        defaults={
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "shared_intermediate_size": 1024,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_head": "auto",
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
        },
        only={"mamba_proj_bias": False, "hidden_act": "silu"},  # of the recurrence, too
        fixed={"shared_gated": False},
        reads=(
            "logits_scaling",
            "shared_intermediate_size",
            "num_local_experts",
            "num_experts_per_tok",
            "layer_types",
            "position_embedding_type",
            "time_step_limit",
            *(f"mamba_{name}" for name in ("n_heads", "n_groups", "d_state", "d_head", "d_conv")),
            "mamba_expand",
            "mamba_conv_bias",
        ),
        other_names={"layers_block_type": "layer_types"},
        rules=rules(ENDS, ATTENTION, NORMS_BEFORE, _mamba("mamba"), _GRANITE_FEED),
        gguf_rules=_GGUF,
    ),
    llama_like(
        "nemotron-h",
        "NemotronHForCausalLM",
        model_type="nemotron_h",
        gguf="nemotron_h",
        keys={"norm_eps": "layer_norm_epsilon", "activation": "mlp_hidden_act"},
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "layer_norm_epsilon": 1e-5,
            "mlp_hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        only={
            "use_bias": False,
            "mlp_bias": False,
            "mamba_proj_bias": False,
            "mamba_hidden_act": "silu",
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_latent_size": None,
        },
        fixed={
            "positions": "none",
            "gated": False,
            "router": "sigmoid",
            "selection_bias": True,
            "shared_gated": False,
        },
        reads=(
            "layers_block_type",
            "hybrid_override_pattern",
            "attention_head_dim",
            "ssm_state_size",
            "mamba_num_heads",
            "mamba_head_dim",
            "n_groups",
            "conv_kernel",
            "use_conv_bias",
            "time_step_limit",
            "n_routed_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "norm_topk_prob",
            "routed_scaling_factor",
        ),
        other_names={
            "layer_types": "layers_block_type",
            "num_local_experts": "n_routed_experts",
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_dt_limit": "time_step_limit",
        },
        prefixes=("backbone.", "model.", "language_model.backbone.", ""),
        rules=_NEMOTRON,
        gguf_rules=rules(layer("blk.{i}.attn_norm", "feed_norm"), _GGUF),
    ),
)
