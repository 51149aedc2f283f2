"""Tiny random checkpoints of the families with recurrent layers, made with transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from helpers import tiny

_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "bos_token_id": None,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}
_GRANITE: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "shared_intermediate_size": 80,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
    "mamba_chunk_size": 16,
}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_NEMOTRON: dict[str, Any] = {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 20,
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 16,
    "bos_token_id": None,
}


def nemotron(word: str, **changes: Any) -> Callable[[], Any]:
    """Layers by one letter each, as its files have them."""
    kinds = [_LETTERS[letter] for letter in word]
    plain = tiny.named("NemotronH", **{**_NEMOTRON, "layers_block_type": kinds, **changes})

    def build() -> Any:
        model = plain()
        model.config.time_step_min = 1e-20  # so that steps have no limit: see `mamba_config.py`
        for layer in model.model.layers:
            if hasattr(layer.mixer, "dt_bias"):
                layer.mixer.time_step_limit = (0.0, math.inf)
                torch.nn.init.uniform_(layer.mixer.dt_bias, -2, 1)  # steps that matter
        return model

    return build


_CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv", "conv"]}

FAMILIES = {
    "lfm2": tiny.named("Lfm2", **_CONV, block_multiple_of=16),
    "lfm2-plain": tiny.named(
        "Lfm2",
        layer_types=["full_attention", "conv", "conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        conv_L_cache=4,
        tie_word_embeddings=False,
    ),
    "lfm2-moe": tiny.named("Lfm2Moe", **_CONV, **_EXPERTS, num_dense_layers=1),
    "lfm2-moe-no-bias": tiny.named(
        "Lfm2Moe",
        **_CONV,
        **_EXPERTS,
        num_dense_layers=2,
        use_expert_bias=False,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
    ),
    "qwen3.5": tiny.named("Qwen3_5", **_DELTA),
    "qwen3.5-alike": tiny.named(
        "Qwen3_5",
        **{**_DELTA, "linear_num_key_heads": 4},
        layer_types=["full_attention", *["linear_attention"] * 3],
        linear_conv_kernel_dim=3,
        tie_word_embeddings=True,
    ),
    "qwen3.5-moe": tiny.named(
        "Qwen3_5Moe", **_DELTA, **_EXPERTS, shared_expert_intermediate_size=24
    ),
    "qwen3-next": tiny.named("Qwen3Next", **_DELTA, **_EXPERTS, shared_expert_intermediate_size=24),
    "qwen3-next-dense": tiny.named(
        "Qwen3Next",
        **_DELTA,
        **_EXPERTS,
        shared_expert_intermediate_size=24,
        mlp_only_layers=[1],
        norm_topk_prob=False,
    ),
    "granite-hybrid": tiny.named("GraniteMoeHybrid", **_GRANITE, num_local_experts=0),
    "granite-hybrid-moe": tiny.named(
        "GraniteMoeHybrid",
        **{**_GRANITE, "shared_intermediate_size": 24, "tie_word_embeddings": True},
        num_local_experts=6,
        num_experts_per_tok=3,
    ),
    "granite-hybrid-turned": tiny.named(  # groups, positions, and no bias of the convolution
        "GraniteMoeHybrid",
        **_GRANITE,
        num_local_experts=0,
        mamba_n_groups=4,
        mamba_conv_bias=False,
        position_embedding_type="rope",
    ),
    "nemotron-h": nemotron("M-M*-M-"),
    "nemotron-h-moe": nemotron(
        "MEM*E",
        n_routed_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        moe_shared_expert_intermediate_size=24,
        routed_scaling_factor=1.5,
    ),
    "nemotron-h-both": nemotron(
        "M-*E",
        n_routed_experts=4,
        moe_intermediate_size=40,
        moe_shared_expert_intermediate_size=24,
        norm_topk_prob=False,
        use_conv_bias=False,
    ),
}
