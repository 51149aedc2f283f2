"""Tiny random checkpoints of the families with recurrent layers, made with transformers."""

from __future__ import annotations

from typing import Any

import tiny

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
}
