"""The model families, as tables: what their files call our settings and our weights.

A new family is a new entry at the end (of `today_families.py`, or of `masked_families.py` if its
tokens look ahead): which
`model_type` names it, which of our settings are fixed for it, where its config.json differs from
Llama's, and where its tensors' names do.
GGUF files use one set of names for all families (`GGUF` in `tensor_names.py`).
"""

from __future__ import annotations

from dataclasses import replace

from unspool.errors import ModelFileError
from unspool.model.family import BIASES, Family, like_llama
from unspool.model.gpt_oss import GPT_OSS
from unspool.model.mamba_families import MAMBA
from unspool.model.masked_families import MASKED
from unspool.model.recurrent_families import RECURRENT
from unspool.model.tensor_names import (
    ATTENTION,
    ENDS,
    FEED,
    IN_LAYER,
    NORMS_AFTER,
    NORMS_AROUND,
    NORMS_BEFORE,
    experts,
    layer,
    rules,
)
from unspool.model.today_families import ALIASES, GGUF_ALIASES, TODAY
from unspool.model.weights import Rule

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


_CAUSAL = (
    like_llama("llama", "LlamaForCausalLM", keys={**BIASES, "ff_bias": "mlp_bias"}),
    like_llama(
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
    like_llama(
        "qwen2",
        "Qwen2ForCausalLM",
        defaults=_SLIDING_QWEN,
        fixed={"qkv_bias": True},
        reads=("max_window_layers",),
        window_layers="later",
        window_needs_switch=True,
    ),
    like_llama(
        "qwen3",
        "Qwen3ForCausalLM",
        keys=BIASES,
        defaults={**_SLIDING_QWEN, "head_dim": 128},
        fixed={"qk_norm": "head"},
        reads=("max_window_layers",),
        window_layers="later",
        window_needs_switch=True,
    ),
    like_llama(
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
    like_llama(
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
    like_llama(
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
    like_llama(
        "olmo2",
        "Olmo2ForCausalLM",
        keys=BIASES,
        defaults={"rms_norm_eps": 1e-5},
        fixed={"norm_before": False, "norm_after": True, "qk_norm": "whole"},
        rules=rules(ENDS, ATTENTION, NORMS_AFTER, FEED),
    ),
    like_llama(
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
    like_llama(
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
        rules=rules(
            ENDS,
            ATTENTION,
            NORMS_BEFORE,
            experts("block_sparse_moe", "w1", "w3", "w2"),
        ),
    ),
    like_llama(
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
                Rule("{p}wte.weight", ("embed.weight",)),
                Rule("{p}wpe.weight", ("position_embed.weight",)),
                Rule("{p}ln_f.weight", ("norm.weight",)),
                Rule("{p}ln_f.bias", ("norm.bias",)),
                Rule("lm_head.weight", ("head.weight",)),
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
                Rule("{p}embed_in.weight", ("embed.weight",)),
                Rule("{p}final_layer_norm.weight", ("norm.weight",)),
                Rule("{p}final_layer_norm.bias", ("norm.bias",)),
                Rule("embed_out.weight", ("head.weight",)),
                Rule("lm_head.weight", ("head.weight",)),
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
)

_ALL = (*_CAUSAL, *TODAY, GPT_OSS, *RECURRENT, *MAMBA, *MASKED)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def family_of_model_type(model_type: object) -> Family:
    """The family that a config.json names, or an error that lists what there is."""
    if model_type in ALIASES:
        name, silent, changes = ALIASES[str(model_type)]
        defaults = {**FAMILIES[name].defaults, **silent}
        return replace(FAMILIES[name], defaults=defaults, **changes)
    for family in _ALL:
        if family.model_type == model_type:
            return family
    known = ", ".join(sorted({family.model_type for family in _ALL} | ALIASES.keys()))
    raise ModelFileError(f"models of type {model_type!r} are not supported; these are: {known}")


def family_of_gguf(architecture: object, experts: int) -> Family:
    """The family behind general.architecture; 'llama' with experts is Mixtral."""
    if architecture in GGUF_ALIASES:
        return FAMILIES[GGUF_ALIASES[str(architecture)]]
    called = [family for family in _ALL if family.gguf == architecture]
    fitting = [family for family in called if ("experts" in family.keys) == (experts > 0)]
    if fitting or len(called) == 1:  # Gemma 4 has experts or not
        return (fitting or called)[0]
    known = ", ".join(sorted({f.gguf for f in _ALL if f.gguf} | GGUF_ALIASES.keys()))
    raise ModelFileError(
        f"GGUF files of architecture {architecture!r} are not supported; these are: {known}"
    )
