"""gpt-oss: attention sinks, a sliding window in every second layer, and experts in MXFP4.

Its expert matrices have alternating rows of gate and up, either as floats (transposed) or packed:
`gate_up_proj_blocks` holds 32 4-bit numbers in 16 bytes, `gate_up_proj_scales` a power of two each.
"""

from __future__ import annotations

from unspool.model.family import llama_like
from unspool.model.tensor_names import ATTENTION, ENDS, IN_LAYER, NORMS_BEFORE, layer, rules
from unspool.model.weights import TensorRule

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
    fixed={
        "sinks": True,
        "router_bias": True,
        "expert_bias": True,
        "activation": "swiglu_clamped",
    },
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
