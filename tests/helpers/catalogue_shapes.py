"""The shapes of the models in the catalogue, as their config.json has them.

What the catalogue says of parameters and of keys and values follows from these; the tests compare.
"""

from __future__ import annotations

from typing import Any


def _shape(
    family: str, layers: int, width: int, heads: str, inner: int, vocabulary: int, **extra: Any
) -> dict[str, Any]:
    """`heads` is "query heads/key heads/width of a head"."""
    query, keys, head = map(int, heads.split("/"))
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": query,
        "num_key_value_heads": keys,
        "head_dim": head,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        **extra,
    }


_UNTIED = {"tie_word_embeddings": False}
_QWEN25_7B = _shape("qwen2", 28, 3584, "28/4/128", 18944, 152064, **_UNTIED)
_QWEN3_MOE = _shape(
    "qwen3_moe", 48, 2048, "32/4/128", 6144, 151936, **_UNTIED,
    num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
)  # fmt: skip

_EXPERTS = {
    "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
}  # fmt: skip


def _gemma4(
    layers: int, width: int, heads: str, inner: int, every: int, keys: int = 0, **extra: Any
) -> dict[str, Any]:
    """Every `every`-th layer has no window; with `keys` KV heads, its keys are its values."""
    far, near = "full_attention", "sliding_attention"
    kinds = [near if (number + 1) % every else far for number in range(layers)]
    if keys:
        extra |= {"attention_k_eq_v": True, "num_global_key_value_heads": keys}
        extra |= {"hidden_size_per_layer_input": 0}
    return _shape("gemma4", layers, width, heads, inner, 262144, layer_types=kinds, **extra)


def _qwen35(
    layers: int, width: int, heads: str, inner: int, values: int, **extra: Any
) -> dict[str, Any]:
    """Every fourth layer has attention; the others have 16 key heads and `values` value heads."""
    linear = {
        "linear_num_key_heads": 16, "linear_num_value_heads": values, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    }  # fmt: skip
    return _shape("qwen3_5_text", layers, width, heads, inner, 248320, **{**linear, **extra})


def _lfm2(
    layers: int, width: int, heads: str, inner: int, attending: tuple[int, ...]
) -> dict[str, Any]:
    kinds = ["full_attention" if n in attending else "conv" for n in range(layers)]
    return _shape(
        "lfm2", layers, width, heads, inner, 65536, layer_types=kinds,
        block_auto_adjust_ff_dim=True, block_ffn_dim_multiplier=1.0, block_multiple_of=256,
        conv_L_cache=3, conv_bias=False,
    )  # fmt: skip


def _granite_hybrid(width: int, heads: str, inner: int, **extra: Any) -> dict[str, Any]:
    """Every tenth layer attends, from the sixth on; the others have Mamba-2, twice as wide."""
    kinds = ["attention" if n % 10 == 5 else "mamba" for n in range(40)]
    mamba = {"mamba_n_heads": width // 32, "mamba_d_head": 64, "mamba_d_state": 128}
    settings = {"layer_types": kinds, "num_local_experts": 0, **mamba, **extra}
    return _shape("granitemoehybrid", 40, width, heads, inner, 100352, **settings)


def _nemotron(
    width: int, heads: str, inner: int, mamba: str, layers: str, **extra: Any
) -> dict[str, Any]:
    """`mamba` is "heads/width of a head"; each letter is a layer."""
    count, wide = map(int, mamba.split("/"))
    settings = {"mamba_num_heads": count, "mamba_head_dim": wide, "hybrid_override_pattern": layers}
    return _shape(
        "nemotron_h", len(layers), width, heads, inner, 131072, **_UNTIED, **settings, **extra
    )


SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _shape("llama", 30, 576, "9/3/64", 1536, 49152),
    "smollm2-360m": _shape("llama", 32, 960, "15/5/64", 2560, 49152),
    "smollm2-1.7b": _shape("llama", 24, 2048, "32/32/64", 8192, 49152),
    "smollm3-3b": _shape("smollm3", 36, 2048, "16/4/128", 11008, 128256),
    "gpt2": {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12,
             "n_positions": 1024, "vocab_size": 50257},
    "pythia-160m": _shape("gpt_neox", 12, 768, "12/12/64", 3072, 50304, **_UNTIED),
    "olmo2-1b": _shape("olmo2", 16, 2048, "16/16/128", 8192, 100352, **_UNTIED),
    "gemma3-270m": _shape("gemma3_text", 18, 640, "4/1/256", 2048, 262144),
    "gemma3-1b": _shape("gemma3_text", 26, 1152, "4/1/256", 6912, 262144),
    "gemma3-4b": _shape("gemma3_text", 34, 2560, "8/4/256", 10240, 262144),
    "gemma3-12b": _shape("gemma3_text", 48, 3840, "16/8/256", 15360, 262144),
    "gemma3-27b": _shape("gemma3_text", 62, 5376, "32/16/128", 21504, 262144),
    "gemma2-2b": _shape("gemma2", 26, 2304, "8/4/256", 9216, 256000),
    "llama3.2-1b": _shape("llama", 16, 2048, "32/8/64", 8192, 128256),
    "llama3.2-3b": _shape("llama", 28, 3072, "24/8/128", 8192, 128256),
    "llama3.1-8b": _shape("llama", 32, 4096, "32/8/128", 14336, 128256, **_UNTIED),
    "llama3.3-70b": _shape("llama", 80, 8192, "64/8/128", 28672, 128256, **_UNTIED),
    "qwen2.5-0.5b": _shape("qwen2", 24, 896, "14/2/64", 4864, 151936),
    "qwen2.5-coder-1.5b": _shape("qwen2", 28, 1536, "12/2/128", 8960, 151936),
    "qwen2.5-coder-7b": _QWEN25_7B,
    "deepseek-r1-7b": _QWEN25_7B,
    "qwen3-0.6b": _shape("qwen3", 28, 1024, "16/8/128", 3072, 151936),
    "qwen3-1.7b": _shape("qwen3", 28, 2048, "16/8/128", 6144, 151936),
    "qwen3-4b": _shape("qwen3", 36, 2560, "32/8/128", 9728, 151936),
    "qwen3-8b": _shape("qwen3", 36, 4096, "32/8/128", 12288, 151936, **_UNTIED),
    "qwen3-14b": _shape("qwen3", 40, 5120, "40/8/128", 17408, 151936, **_UNTIED),
    "qwen3-32b": _shape("qwen3", 64, 5120, "64/8/128", 25600, 151936, **_UNTIED),
    "qwen3-30b-a3b": _QWEN3_MOE,
    "qwen3-coder-30b-a3b": _QWEN3_MOE,
    "phi4-mini": _shape("phi3", 32, 3072, "24/8/128", 8192, 200064),
    "phi4": _shape("phi3", 40, 5120, "40/10/128", 17920, 100352, **_UNTIED),
    "mistral-7b": _shape("mistral", 32, 4096, "32/8/128", 14336, 32768, **_UNTIED),
    "mistral-nemo-12b": _shape("mistral", 40, 5120, "32/8/128", 14336, 131072, **_UNTIED),
    "mistral-small-24b": _shape("mistral", 40, 5120, "32/8/128", 32768, 131072, **_UNTIED),
    "gemma4-e2b": _gemma4(
        35, 1536, "8/1/256", 6144, 5, num_kv_shared_layers=20, use_double_wide_mlp=True
    ),
    "gemma4-e4b": _gemma4(42, 2560, "8/2/256", 10240, 6, num_kv_shared_layers=18),
    "gemma4-12b": _gemma4(48, 3840, "16/8/256", 15360, 6, keys=1),
    "gemma4-26b-a4b": _gemma4(30, 2816, "16/8/256", 2112, 6, keys=2, **_EXPERTS),
    "gemma4-31b": _gemma4(60, 5376, "32/16/256", 21504, 6, keys=4),
    "ministral3-3b": _shape("ministral3", 26, 3072, "32/8/128", 9216, 131072),
    "ministral3-8b": _shape("ministral3", 34, 4096, "32/8/128", 14336, 131072, **_UNTIED),
    "ministral3-14b": _shape("ministral3", 40, 5120, "32/8/128", 16384, 131072, **_UNTIED),
    "qwen3-vl-4b": _shape("qwen3_vl", 36, 2560, "32/8/128", 9728, 151936),
    "qwen3-vl-8b": _shape("qwen3_vl", 36, 4096, "32/8/128", 12288, 151936, **_UNTIED),
    "granite4.1-3b": _shape("granite", 40, 2560, "40/8/64", 8192, 100352),
    "granite4.1-8b": _shape("granite", 40, 4096, "32/8/128", 12800, 100352),
    "olmo3-7b": _shape("olmo3", 32, 4096, "32/32/128", 11008, 100278, **_UNTIED),
    "granite4-h-micro": _granite_hybrid(2048, "32/8/64", 8192, shared_intermediate_size=8192),
    "granite4-h-tiny": _granite_hybrid(
        1536, "12/4/128", 512, shared_intermediate_size=1024, num_local_experts=64,
        num_experts_per_tok=6,
    ),
    "nemotron3-nano-4b": _nemotron(
        3136, "40/8/128", 12544, "96/80", "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"
    ),
    "nemotron3-nano-30b-a3b": _nemotron(
        2688, "32/2/128", 1856, "64/64", "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712, routed_scaling_factor=2.5,
    ),
    "qwen3.5-0.8b": _qwen35(24, 1024, "8/2/256", 3584, 16),
    "qwen3.5-2b": _qwen35(24, 2048, "8/2/256", 6144, 16),
    "qwen3.5-4b": _qwen35(32, 2560, "16/4/256", 9216, 32),
    "qwen3.5-9b": _qwen35(32, 4096, "16/4/256", 12288, 32, **_UNTIED),
    "gpt-oss-20b": _shape(
        "gpt_oss", 24, 2880, "64/8/64", 2880, 201088, **_UNTIED, num_local_experts=32,
        num_experts_per_tok=4, sliding_window=128,
    ),
    "lfm2.5-1.2b": _lfm2(16, 2048, "32/8/64", 12288, (2, 5, 8, 10, 12, 14)),
}  # fmt: skip
