"""Families with Mamba-2 layers, as tables."""

from __future__ import annotations

from unspool.model.family import BIASES, llama_like
from unspool.model.tensor_names import (
    ATTENTION,
    ENDS,
    IN_LAYER,
    NORMS_BEFORE,
    layer,
    rules,
)
from unspool.model.weights import TensorRule


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
