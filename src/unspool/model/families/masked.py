"""The families whose tokens look ahead: masked and block diffusion, and BERT with its kin.

Diffusion models are Llamas and Qwens in all but how far a token looks. BERTs are older: they norm
sums, learn positions, and put one more matrix before the head.
"""

from __future__ import annotations

from typing import Any

from unspool.model.families.family import Family, Table, layer, llama_like, rules
from unspool.model.weights import TensorRule

_MASK = {"mask_id": "mask_token_id"}
_BLOCK = {**_MASK, "block": "block_size"}  # without a block, such a model sees the whole text
_WHOLE = {"sight": "whole"}


def _qwen(base: str, model_type: str, architecture: str, **options: Any) -> Family:
    """A Qwen 2 or 3 converted to a diffusion model."""
    qwen3 = base == "qwen3"
    merged_options: dict[str, Any] = {"gguf": "", "only": {"use_sliding_window": False}, **options}
    merged_options["fixed"] = {
        **({"qk_norm": "head"} if qwen3 else {"qkv_bias": True}),
        **options.get("fixed", {}),
    }
    merged_options["defaults"] = {
        **({"head_dim": 128} if qwen3 else {}),
        **options.get("defaults", {}),
    }
    return llama_like(model_type.lower(), architecture, model_type=model_type, **merged_options)


_LLADA = llama_like(
    "llada",
    "LLaDAModelLM",
    keys={
        **_MASK,
        "vocab_size": "embedding_size",
        "width": "d_model",
        "layers": "n_layers",
        "heads": "n_heads",
        "kv_heads": "n_kv_heads",
        "ff_width": "mlp_hidden_size",
        "context": "max_sequence_length",
        "activation": "activation_type",
        "tied": "weight_tying",
        "qkv_bias": "include_qkv_bias",
    },
    defaults={"activation_type": "silu", "weight_tying": False, "rms_norm_eps": 1e-5},
    only={
        "block_type": "llama",
        "layer_norm_type": "rms",
        "rope": True,
        "alibi": False,
        "include_bias": False,
        "bias_for_layer_norm": False,
        "attention_layer_norm": False,
        "input_emb_norm": False,
        "scale_logits": False,
        "multi_query_attention": False,
        "clip_qkv": None,
    },
    fixed=_WHOLE,
    reads=("mlp_ratio",),
    mask_id=126336,
    prefixes=("model.transformer.", "transformer."),
    rules=rules(
        (
            TensorRule("{p}wte.weight", ("embed.weight",)),
            TensorRule("{p}ln_f.weight", ("norm.weight",)),
            TensorRule("{p}ff_out.weight", ("head.weight",)),
        ),
        layer("{p}blocks.{i}.attn_norm", "attention_norm"),
        layer("{p}blocks.{i}.q_proj", "attention.q"),
        layer("{p}blocks.{i}.k_proj", "attention.k"),
        layer("{p}blocks.{i}.v_proj", "attention.v"),
        layer("{p}blocks.{i}.attn_out", "attention.out"),
        layer("{p}blocks.{i}.ff_norm", "feed_norm"),
        layer("{p}blocks.{i}.ff_proj", "feed.gate"),
        layer("{p}blocks.{i}.up_proj", "feed.up"),
        layer("{p}blocks.{i}.ff_out", "feed.down"),
    ),
)

_DIFFUSION = (
    _LLADA,
    _qwen(
        "qwen2",
        "Dream",
        "DreamModel",
        gguf="dream",
        keys=_MASK,
        only={"use_sliding_window": False, "use_mrope": False, "block_size": None},
        fixed={**_WHOLE, "shifted": True},
        mask_id=151666,
    ),
    _qwen(
        "qwen3", "sdar", "SDARForCausalLM", keys=_BLOCK, defaults={"block_size": 4}, mask_id=151669
    ),
    _qwen(
        "qwen2",
        "Fast_dLLM_Qwen",
        "Fast_dLLM_QwenForCausalLM",
        keys={**_MASK, "block": "bd_size"},
        defaults={"bd_size": 32},
        fixed={"shifted": True},
        mask_id=151665,
    ),
    _qwen("qwen3", "a2d-qwen3", "A2DQwen3LMHeadModel", keys=_BLOCK, mask_id=151669),
    _qwen("qwen2", "a2d-qwen2", "A2DQwen2LMHeadModel", keys=_BLOCK, mask_id=151665),
)


def _weight_and_bias(tensor: str, weight: str) -> tuple[TensorRule, ...]:
    return tuple(
        TensorRule(f"{tensor}.{part}", (f"{weight}.{part}",)) for part in ("weight", "bias")
    )


def _norm(tensor: str, weight: str) -> tuple[TensorRule, ...]:
    """A norm; the oldest files name its weight and bias gamma and beta."""
    gamma, beta = (
        TensorRule(f"{tensor}.gamma", (f"{weight}.weight",)),
        TensorRule(f"{tensor}.beta", (f"{weight}.bias",)),
    )
    return (*_weight_and_bias(tensor, weight), gamma, beta)


def _positions(*, types: bool, reserved: int = 0) -> TensorRule:
    """The position table. All tokens have token type 0, so its vector is added to the table."""
    added_tensor = "{p}embeddings.token_type_embeddings.weight" if types else ""
    name = "{p}embeddings.position_embeddings.weight"
    return TensorRule(
        name, ("position_embed.weight",), added_tensor=added_tensor, reserved=reserved
    )


_WORDS = (
    TensorRule("{p}embeddings.word_embeddings.weight", ("embed.weight",)),
    *_norm("{p}embeddings.LayerNorm", "embed_norm"),
)
_AT = "{p}encoder.layer.{i}."
_BERT_LAYERS = rules(
    layer(_AT + "attention.self.query", "attention.q"),
    layer(_AT + "attention.self.key", "attention.k"),
    layer(_AT + "attention.self.value", "attention.v"),
    layer(_AT + "attention.output.dense", "attention.out"),
    _norm(_AT + "attention.output.LayerNorm", "layers.{i}.attention_post_norm"),
    layer(_AT + "intermediate.dense", "feed.up"),
    layer(_AT + "output.dense", "feed.down"),
    _norm(_AT + "output.LayerNorm", "layers.{i}.feed_post_norm"),
)
_BERT_FIXED = {
    **_WHOLE,
    "norm": "layer",
    "norm_before": False,
    "norm_sums": True,
    "embedding_norm": True,
    "positions": "learned",
    "gated": False,
    "qkv_bias": True,
    "out_bias": True,
    "ff_bias": True,
    "head_bias": True,
    "head_transform": True,
    "head_transform_bias": True,
}
_BERT_KEYS = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ff_width": "intermediate_size",
    "context": "max_position_embeddings",
    "norm_eps": "layer_norm_eps",
    "activation": "hidden_act",
    "tied": "tie_word_embeddings",
}
_BERT_DEFAULTS = {
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "intermediate_size": 3072,
}
_BERT_ONLY = {
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
}


def _bert(name: str, architecture: str, *, only: Table | None = None, **options: Any) -> Family:
    merged_options = {
        "keys": _BERT_KEYS,
        "defaults": _BERT_DEFAULTS,
        "fixed": _BERT_FIXED,
        **options,
    }
    return Family(
        name=name,
        model_type=name,
        architecture=architecture,
        gguf="",  # such files hold no masked-LM head
        only={**_BERT_ONLY, **(only or {})},
        **merged_options,
    )


_MODERN = Family(
    name="modernbert",
    model_type="modernbert",
    architecture="ModernBertForMaskedLM",
    gguf="",
    keys={
        **_BERT_KEYS,
        "norm_eps": "norm_eps",
        "norm_bias": "norm_bias",
        "activation": "hidden_activation",
        "qkv_bias": "attention_bias",
        "out_bias": "attention_bias",
        "ff_bias": "mlp_bias",
        "head_bias": "decoder_bias",
        "head_transform_bias": "classifier_bias",
    },
    defaults={
        "norm_eps": 1e-5,
        "norm_bias": False,
        "hidden_activation": "gelu",
        "attention_bias": False,
        "mlp_bias": False,
        "decoder_bias": True,
        "classifier_bias": False,
        "tie_word_embeddings": True,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
        "max_position_embeddings": 8192,
        "intermediate_size": 1152,
        "classifier_activation": "gelu",
    },
    fixed={**_WHOLE, "norm": "layer", "embedding_norm": True, "head_transform": True},
    reads=(
        "local_attention",
        "global_attn_every_n_layers",
        "global_rope_theta",
        "local_rope_theta",
        "classifier_activation",
    ),
    rotary_reads=("rope_parameters", "rope_scaling"),
    rotary_by_kind=True,
    window_layers="but every nth",
    prefixes=("model.", ""),
    rules=rules(
        (TensorRule("{p}embeddings.tok_embeddings.weight", ("embed.weight",)),),
        _weight_and_bias("{p}embeddings.norm", "embed_norm"),
        layer("{p}layers.{i}.attn_norm", "attention_norm"),
        layer("{p}layers.{i}.attn.Wqkv", "attention.q", "attention.k", "attention.v"),
        layer("{p}layers.{i}.attn.Wo", "attention.out"),
        layer("{p}layers.{i}.mlp_norm", "feed_norm"),
        layer("{p}layers.{i}.mlp.Wi", "feed.gate", "feed.up"),
        layer("{p}layers.{i}.mlp.Wo", "feed.down"),
        _weight_and_bias("{p}final_norm", "transform.norm"),
        _weight_and_bias("head.dense", "transform.dense"),
        _weight_and_bias("head.norm", "norm"),
        _weight_and_bias("decoder", "head"),
        (TensorRule("decoder.bias", ("head_bias",)),),
    ),
)

_BERTS = (
    _bert(
        "bert",
        "BertForMaskedLM",
        prefixes=("bert.", ""),
        rules=rules(
            _WORDS,
            (_positions(types=True),),
            _BERT_LAYERS,
            _weight_and_bias("cls.predictions.transform.dense", "transform.dense"),
            _norm("cls.predictions.transform.LayerNorm", "norm"),
            _weight_and_bias("cls.predictions.decoder", "head"),
            (
                TensorRule("cls.predictions.bias", ("head_bias",)),
                TensorRule("cls.predictions.bias", ("head.bias",)),
            ),
        ),
    ),
    _bert(
        "roberta",
        "RobertaForMaskedLM",
        only={"hidden_act": "gelu", "pad_token_id": 1},
        prefixes=("roberta.", ""),
        rules=rules(
            _WORDS,
            (_positions(types=True, reserved=2),),  # positions count on from the padding's number
            _BERT_LAYERS,
            _weight_and_bias("lm_head.dense", "transform.dense"),
            _norm("lm_head.layer_norm", "norm"),
            _weight_and_bias("lm_head.decoder", "head"),
            (
                TensorRule("lm_head.bias", ("head_bias",)),
                TensorRule("lm_head.bias", ("head.bias",)),
            ),
        ),
    ),
    _bert(
        "distilbert",
        "DistilBertForMaskedLM",
        keys={
            **_BERT_KEYS,
            "width": "dim",
            "layers": "n_layers",
            "heads": "n_heads",
            "ff_width": "hidden_dim",
            "activation": "activation",
        },
        defaults={**_BERT_DEFAULTS, "activation": "gelu", "hidden_dim": 3072},
        other_names={
            "hidden_size": "dim",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
        },
        only={"sinusoidal_pos_embds": False},
        prefixes=("distilbert.", ""),
        rules=rules(
            _WORDS,
            (_positions(types=False),),
            layer("{p}transformer.layer.{i}.attention.q_lin", "attention.q"),
            layer("{p}transformer.layer.{i}.attention.k_lin", "attention.k"),
            layer("{p}transformer.layer.{i}.attention.v_lin", "attention.v"),
            layer("{p}transformer.layer.{i}.attention.out_lin", "attention.out"),
            layer("{p}transformer.layer.{i}.sa_layer_norm", "attention_post_norm"),
            layer("{p}transformer.layer.{i}.ffn.lin1", "feed.up"),
            layer("{p}transformer.layer.{i}.ffn.lin2", "feed.down"),
            layer("{p}transformer.layer.{i}.output_layer_norm", "feed_post_norm"),
            _weight_and_bias("vocab_transform", "transform.dense"),
            _weight_and_bias("vocab_layer_norm", "norm"),
            _weight_and_bias("vocab_projector", "head"),
            (TensorRule("vocab_projector.bias", ("head_bias",)),),
        ),
    ),
    _MODERN,
)

MASKED: tuple[Family, ...] = (*_DIFFUSION, *_BERTS)
