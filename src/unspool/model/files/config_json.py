"""transformers' config.json to `ModelConfig` and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from unspool.errors import ModelFileError, UnspoolError
from unspool.model.config import LARGEST_SIZES, ModelConfig, Rotary
from unspool.model.families.family import Family, check_length
from unspool.model.families.registry import FAMILIES, family_of_model_type
from unspool.model.files.family_settings import (
    extra_settings_from_hf,
    extra_settings_to_hf,
    list_nemotron_layers,
    needs_unspool_format,
    recurrent_from_hf,
    recurrent_to_hf,
)
from unspool.model.files.quantized import scheme_of

# -- Convert transformers' config.json to `ModelConfig` and back
#
# Simple settings are in the tables of the families. This module has the rest: sliding windows,
# RoPE scaling, older spellings of the same setting.

Raw = Mapping[str, Any]

_ACTIVATIONS = {
    "swish": "silu",
    "silu": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
OUR_MODEL_TYPE = "unspool"  # Unspool's own format: `settings` holds the fields of ModelConfig
ROBERTA_RESERVED = 2  # unused rows of the position table: numbering starts after the padding id
# Attention mask and mask token: transformers has no keys for them, so they are under "unspool".
_SIGHT = ("sight", "block", "mask_id", "shifted")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ModelFileError: The file cannot be read, or does not hold a JSON object.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not valid JSON ({error}); download it again") from error
    if not isinstance(loaded, dict):
        raise ModelFileError(f"{path}: must hold a JSON object, got {type(loaded).__name__}")
    return loaded


def config_from_hf(raw: Raw) -> ModelConfig:
    """Convert the content of a config.json."""
    if "model_type" not in raw:
        raise ModelFileError("config.json has no model_type; is this a language model?")
    check_types(
        raw, ("model_type", "text_config", "quantization_config", "quantization", "settings")
    )
    if raw["model_type"] == OUR_MODEL_TYPE:
        return ModelConfig.from_dict(dict(raw.get("settings") or {}))
    scheme_of(raw)  # raises for unsupported quantization
    if raw.get("text_config") is not None:  # multimodal: only the language model is read
        raw = _language_part(raw)
    family = family_of_model_type(raw["model_type"])
    try:
        return ModelConfig(family=family.name, **_settings(family, raw))
    except UnspoolError:
        raise
    except (
        TypeError, KeyError, ValueError, AttributeError, ArithmeticError, IndexError
    ) as error:  # fmt: skip
        raise ModelFileError(
            f"config.json cannot be understood as a {family.name} model: {error!r}"
        ) from error


def _language_part(raw: Raw) -> Raw:
    """The settings of a multimodal model's language model."""
    text = {"model_type": raw["model_type"], **raw["text_config"]}
    if "tie_word_embeddings" in raw:  # the head is outside text_config
        text["tie_word_embeddings"] = raw["tie_word_embeddings"]
    check_types(text, ("model_type", "eos_token_id"))
    check_types(raw, ("eos_token_id",))
    return {**text, "eos_token_id": _end_ids(raw) or _end_ids(text)}


# -- types of values ------------------------------------------------------------------------

_TYPES: dict[str, tuple[str, ...]] = {
    "an integer": (
        "vocab_size", "embedding_size", "hidden_size", "d_model", "dim", "n_embd",
        "num_hidden_layers", "n_layer", "n_layers", "num_attention_heads", "n_head", "n_heads",
        "intermediate_size", "mlp_hidden_size", "hidden_dim", "n_inner", "num_key_value_heads",
        "n_kv_heads", "head_dim", "attention_head_dim", "global_head_dim",
        "num_global_key_value_heads", "max_position_embeddings", "max_sequence_length",
        "n_positions", "original_max_position_embeddings", "sliding_window", "local_attention",
        "sliding_window_pattern", "max_window_layers", "no_rope_layer_interval",
        "global_attn_every_n_layers", "full_attention_interval", "decoder_sparse_step",
        "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok",
        "top_k_experts", "moe_intermediate_size", "shared_intermediate_size",
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
        "num_dense_layers", "num_kv_shared_layers", "hidden_size_per_layer_input",
        "vocab_size_per_layer_input", "block_ff_dim", "block_multiple_of", "conv_L_cache",
        "conv_kernel", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
        "linear_num_key_heads", "linear_num_value_heads", "n_groups", "ssm_state_size",
        "mamba_num_heads", "mamba_head_dim", "mamba_n_heads", "mamba_n_groups", "mamba_d_state",
        "mamba_d_conv", "mamba_expand", "mask_token_id", "block_size", "bd_size",
    ),
    "a number": (
        "rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta",
        "rope_local_base_freq", "global_rope_theta", "local_rope_theta", "rotary_emb_base",
        "rotary_pct", "partial_rotary_factor", "attn_logit_softcapping",
        "final_logit_softcapping", "query_pre_attn_scalar", "embedding_multiplier",
        "attention_multiplier", "residual_multiplier", "logits_scaling", "swiglu_limit",
        "swiglu_alpha", "routed_scaling_factor", "block_ffn_dim_multiplier", "mlp_ratio",
        "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "low_freq_factor", "high_freq_factor", "llama_4_scaling_beta",
    ),
    "true or false": (
        "tie_word_embeddings", "tie_embedding", "weight_tying", "attention_bias", "mlp_bias",
        "norm_bias", "decoder_bias", "classifier_bias", "include_qkv_bias", "conv_bias",
        "use_conv_bias", "mamba_conv_bias", "use_sliding_window", "use_parallel_residual",
        "is_causal", "norm_topk_prob", "use_expert_bias", "block_auto_adjust_ff_dim",
        "attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block", "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx", "truncate",
    ),
    "a string": (
        "model_type", "hidden_act", "hidden_activation", "activation_function", "activation",
        "activation_type", "mlp_hidden_act", "classifier_activation", "position_embedding_type",
        "hybrid_override_pattern", "rope_type", "type",
    ),
    "an object": (
        "text_config", "quantization_config", "quantization", "rope_parameters", "rope_scaling",
        "settings",
        "unspool", "per_layer_config", "full_attention", "sliding_attention",
    ),
    "a list of strings": ("layer_types", "layers_block_type", "mlp_layer_types"),
    "a list of integers": ("mlp_only_layers", "full_attn_idxs", "no_rope_layers"),
    "a list of numbers": ("short_factor", "long_factor"),
    "an integer or a list of them": ("eos_token_id",),
    "an integer or 'auto'": ("mamba_d_head",),
}  # fmt: skip
_TYPE_OF = {key: type_ for type_, keys in _TYPES.items() for key in keys}
_LARGEST_NUMBER = 1e15  # larger numbers mean a damaged file


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and (
        -_LARGEST_NUMBER <= value <= _LARGEST_NUMBER  # not nan either
    )  # fmt: skip


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_list(value: object, is_item: Callable[[object], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(is_item, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "an integer": _is_whole,
    "a number": _is_number,
    "true or false": lambda value: isinstance(value, bool),
    "a string": _is_text,
    "an object": lambda value: isinstance(value, Mapping),
    "a list of strings": lambda value: _is_list(value, _is_text),
    "a list of integers": lambda value: _is_list(value, _is_whole),
    "a list of numbers": lambda value: _is_list(value, _is_number),
    "an integer or a list of them": lambda v: _is_whole(v) or _is_list(v, _is_whole),
    "an integer or 'auto'": lambda value: _is_whole(value) or value == "auto",
}


def check_types(raw: Raw, keys: Iterable[str], where: str = "config.json") -> None:
    """Raise if a value has the wrong type. Null is accepted here for every type: its meaning
    depends on the key."""
    for key in keys:
        value, type_ = raw.get(key), _TYPE_OF.get(key)
        if value is not None and type_ is not None and not _CHECKS[type_](value):
            raise ModelFileError(f"{where}: {key} must be {type_}, got {format_value(value)}")


def format_value(value: object) -> str:
    """Format a JSON value for a message, truncated to 60 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- settings -------------------------------------------------------------------------------

# Numbers that may be null: no window, no cap, no block, or derived from other settings.
_NULLABLE = (
    "sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "block_size", "bd_size",
    "mask_token_id", "num_key_value_heads", "n_kv_heads", "head_dim", "attention_head_dim",
    "n_inner", "original_max_position_embeddings", "max_window_layers", "pad_token_id",
)  # fmt: skip
_POSITIVE = (
    "attention_multiplier",
    "head_dim", "query_pre_attn_scalar", "logits_scaling", "decoder_sparse_step",
    "block_multiple_of", "no_rope_layer_interval", "global_attn_every_n_layers",
    "full_attention_interval", "sliding_window_pattern", "rope_theta", "rope_local_base_freq",
    "local_attention", "mamba_n_heads", "mlp_ratio", "block_ffn_dim_multiplier",
)  # fmt: skip
_NEVER_NULL = ("an integer", "a number", "a string", "an integer or 'auto'")
_SOFTCAPS = ("attention_softcap", "logit_softcap")  # null: none


def _settings(family: Family, raw: Raw) -> dict[str, Any]:
    """All fields of ModelConfig except the family's name."""
    full = _known_settings(family, _usual_names(family, raw))
    values: dict[str, Any] = {
        setting: full[key] for setting, key in family.keys.items() if key in full
    }
    for setting, value in list(values.items()):
        if value is not None:
            continue
        if setting in _SOFTCAPS:
            values[setting] = 0.0
        elif family.keys[setting] in _NULLABLE:
            del values[setting]
        elif _TYPE_OF.get(family.keys[setting]) == "true or false":
            values[setting] = False
        else:
            type_ = _TYPE_OF.get(family.keys[setting], "given")
            raise ModelFileError(f"config.json: {family.keys[setting]} must be {type_}, got null")
    for key, expected in family.required.items():
        value = full.get(key, expected)
        if (value or None) != (expected or None):
            raise ModelFileError(
                f"config.json: {key} is {format_value(value)}; a {family.name} model is supported "
                + (
                    f"only where it is {format_value(expected)}"
                    if expected is not None
                    else "without it only"
                )
            )
    for size_name in _SIZES:
        key = family.keys[size_name]
        if size_name not in values:
            raise ModelFileError(f"config.json lacks {key!r}; it is incomplete")
        if not 1 <= values[size_name] <= LARGEST_SIZES[size_name]:
            raise ModelFileError(
                f"config.json: {key} must be an integer from 1 to "
                f"{LARGEST_SIZES[size_name]:,}, got {values[size_name]}"
            )
    values.update(family.fixed)
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("head_width", values["width"] // values["heads"])
    if values["head_width"] < 1:
        raise ModelFileError(
            f"config.json: {family.keys['width']} must be at least {family.keys['heads']}, "
            f"got {values['width']} and {values['heads']}"
        )
    if family.keys["ff_width"] != "n_inner" and "ff_width" not in values:
        raise ModelFileError(f"config.json lacks {family.keys['ff_width']!r}; it is incomplete")
    values.setdefault("ff_width", 4 * values["width"])
    if "activation" not in family.fixed:
        values["activation"] = _activation(family, full)
    values["end_ids"] = _end_ids(raw)
    values.update(_sight(family, full, values))
    values["windows"] = _windows(family, full, values)
    values.update(recurrent_from_hf(family, full, values))
    values.update(extra_settings_from_hf(family, full, values))
    if values.get("positions", "rotary") == "rotary":
        values.update(_rotations(family, full, values))
    if family.name in ("gemma2", "gemma3"):
        values["embedding_scale"] = math.sqrt(values["width"])
        values["attention_scale"] = full["query_pre_attn_scalar"] ** -0.5
    if family.name == "gpt2":
        values.update(_gpt2_scales(full, values))
    if family.name == "smollm3":
        values["unrotated_layers"] = _unrotated(full, values["layers"])
    if family.name in ("qwen3-moe", "qwen3-next"):
        values["dense_layers"] = _dense_layers(full, values["layers"])
    if family.name == "roberta":
        values["context"] -= ROBERTA_RESERVED
    return values


_SIZES = ("vocab_size", "width", "layers", "heads", "context")


def _known_settings(family: Family, raw: Raw) -> dict[str, Any]:
    """The settings of this family under their main keys, with defaults for missing ones. Null is a
    value."""
    settings = {key: raw[key] for key in family.settings if key in raw}
    check_types(settings, settings)
    for key in ("rope_parameters", "rope_scaling"):
        check_types(settings.get(key) or {}, _ROPE_KEYS, f"config.json, {key}")
    for key, value in settings.items():
        has_other_default = value is None and family.defaults.get(key) is not None
        if has_other_default and key not in _NULLABLE and _TYPE_OF.get(key, "") in _NEVER_NULL:
            raise ModelFileError(f"config.json: {key} must be {_TYPE_OF[key]}, got null")
        if key in _POSITIVE and value is not None and value <= 0:
            raise ModelFileError(
                f"config.json: {key} must be more than 0, got {format_value(value)}"
            )
    for name, key in family.other_names.items():
        value = settings.pop(name, None)
        if value is not None:
            settings[key] = value
    for key in ("rope_parameters", "rope_scaling"):  # null: the default, as in transformers
        if settings.get(key) is None:
            settings.pop(key, None)
    if settings.get("rope_scaling"):  # the older key takes precedence over the default
        settings.setdefault("rope_parameters", {})
    return {**family.defaults, **settings}


def _activation(family: Family, full: Raw) -> str:
    activation = full.get(family.keys["activation"])
    if activation not in _ACTIVATIONS:
        raise ModelFileError(
            f"the activation {activation!r} is not supported; these are: {', '.join(_ACTIVATIONS)}"
        )
    if full.get("classifier_activation", activation) != activation:
        raise ModelFileError("config.json has two different activations, which is not supported")
    return _ACTIVATIONS[activation]


def _sight(family: Family, full: Raw, values: Mapping[str, Any]) -> dict[str, Any]:
    """Attention mask and mask token; checkpoints saved by Unspool have them under "unspool"."""
    settings: dict[str, Any] = {}
    if "block" in family.keys:
        settings["sight"] = "block" if values.get("block") else "whole"
    if not full.get("is_causal", True) or _both_ways(family, full):  # null is false, too
        settings["sight"] = "whole"
    if values.get("mask_id") is None and (family.mask_id or 0) < values["vocab_size"]:
        settings["mask_id"] = family.mask_id
    unspool_settings = full.get("unspool") or {}
    return settings | {name: v for name, v in unspool_settings.items() if name in _SIGHT}


def _both_ways(family: Family, full: Raw) -> bool:
    """Whether a Gemma 3 has bidirectional attention, as EmbeddingGemma has."""
    value = full.get("use_bidirectional_attention") if family.name == "gemma3" else None
    if not isinstance(value, bool | None):
        raise ModelFileError(
            "config.json: use_bidirectional_attention must be true or false, "
            f"got {format_value(value)}"
        )
    return bool(value)


def _gpt2_scales(full: Raw, values: Mapping[str, Any]) -> dict[str, Any]:
    """GPT-2: attention scores may be unscaled, or divided by the layer's number."""
    scale = values["head_width"] ** -0.5 if full["scale_attn_weights"] else 1.0
    settings: dict[str, Any] = {} if full["scale_attn_weights"] else {"attention_scale": scale}
    if full["scale_attn_by_inverse_layer_idx"]:
        scales = tuple(scale / (layer + 1) for layer in range(values["layers"]))
        settings["attention_scales"] = scales
    return settings


def _usual_names(family: Family, raw: Raw) -> Raw:
    """Translate the unusual keys of a few families to the usual ones."""
    if family.name == "llada":
        check_types(raw, ("mlp_ratio", "d_model", "vocab_size", "embedding_size"))
        ratio = raw.get("mlp_ratio") or 4
        size = {"embedding_size": raw.get("embedding_size") or raw.get("vocab_size")}
        width = {
            "mlp_hidden_size": raw.get("mlp_hidden_size") or int(ratio * (raw.get("d_model") or 0))
        }
        return {**raw, **size, **width}
    if family.name == "nemotron-h":
        check_types(raw, ("layers_block_type", "layer_types", "hybrid_override_pattern"))
        return list_nemotron_layers(raw)
    if family.name == "modernbert":
        full = _known_settings(family, raw)
        if full["local_attention"] is None:
            raise ModelFileError("config.json: local_attention must be an integer, got null")
        return {**raw, "sliding_window": full["local_attention"] // 2 + 1}
    return raw


def _end_ids(raw: Raw) -> tuple[int, ...]:
    end_ids = raw.get("eos_token_id")
    ids = end_ids if isinstance(end_ids, list | tuple) else [end_ids]
    return tuple(token_id for token_id in ids if token_id is not None)


def _unrotated(full: Raw, layers: int) -> tuple[int, ...]:
    flags = full.get("no_rope_layers")
    if flags is None:
        interval = full["no_rope_layer_interval"]
        flags = [int((layer + 1) % interval != 0) for layer in range(layers)]
    check_length("no_rope_layers", flags, layers)
    return tuple(layer for layer, rotated in enumerate(flags) if not rotated)


def _dense_layers(full: Raw, layers: int) -> tuple[int, ...]:
    dense = {layer for layer in full.get("mlp_only_layers") or () if 0 <= layer < layers}
    interval = full["decoder_sparse_step"]
    dense.update(layer for layer in range(layers) if (layer + 1) % interval)
    return tuple(sorted(dense))


def _windows(family: Family, full: Raw, values: Mapping[str, Any]) -> tuple[int, ...]:
    """Sliding window of each layer; empty: no layer has one."""
    layers, window = values["layers"], full.get("sliding_window")
    kinds = full.get("layer_types")
    is_enabled = not family.window_needs_switch or full.get("use_sliding_window")
    if family.name == "smollm3" and kinds is not None:  # the list itself enables the windows
        is_enabled = True
    if not family.window_layers or not window or not is_enabled:
        return ()
    if kinds is not None:
        check_length("layer_types", kinds, layers)
    if values.get("sight") == "whole" and family.name != "modernbert":
        # Bidirectional: the window counts distances in both directions; Gemma halves it first.
        window = window // 2 + 1 if _both_ways(family, full) else window + 1
    pattern = full.get("sliding_window_pattern") or 6
    unrotated = _unrotated(full, layers) if family.window_layers == "unrotated" else ()

    def has_window(layer: int) -> bool:
        if kinds is not None:
            return bool(kinds[layer] == "sliding_attention")
        if family.window_layers == "later":
            return bool(layer >= full["max_window_layers"])
        if family.window_layers == "every second":
            return layer % 2 == 0
        if family.window_layers == "three of four":
            return (layer + 1) % 4 != 0
        if family.window_layers == "five of six":
            return bool((layer + 1) % pattern != 0)
        if family.window_layers == "but every nth":
            return bool(layer % full["global_attn_every_n_layers"] != 0)
        return family.window_layers == "all" or layer in unrotated

    windows = tuple(window if has_window(layer) else 0 for layer in range(layers))
    return windows if any(windows) else ()


# -- rotary positions -----------------------------------------------------------------------

_ROPE_KEYS = (
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor",
    "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "truncate", "short_factor", "long_factor", "low_freq_factor",
    "high_freq_factor", "llama_4_scaling_beta",
)  # fmt: skip


def _rotations(family: Family, full: Raw, values: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE settings: one for all layers, or a second one for layers with a window."""
    if family.rotary_by_kind:
        return _rotations_by_kind(family, full, values)
    rope = full.get("rope_scaling") or full.get("rope_parameters") or {}
    original = full.get("original_max_position_embeddings")
    if original is not None:  # the top-level key takes precedence
        rope = {**rope, "original_max_position_embeddings": original}
    if family.name == "phi3" and rope.get("rope_type", rope.get("type")) == "yarn":
        rope = {**rope, "rope_type": "longrope"}
    share = full.get("partial_rotary_factor")
    partial = "partial_rotary_factor" in family.settings
    return {"rotary": _rotary(rope, full["rope_theta"], share, values, partial=partial)}


def _rotations_by_kind(family: Family, full: Raw, values: Mapping[str, Any]) -> dict[str, Any]:
    rope, scaling = full.get("rope_parameters") or {}, full.get("rope_scaling") or {}
    kinds = ("full_attention", "sliding_attention")
    check_types(rope, kinds, "config.json, rope_parameters")
    if rope and not any(kind in rope for kind in kinds):
        raise ModelFileError(
            f"config.json: rope_parameters of a {family.name} model must hold full_attention and "
            f"sliding_attention, got {format_value(rope)}"
        )
    bases = _default_bases(family, full)
    windows = values["windows"] or (0,) * values["layers"]
    rotaries = {}
    for name, kind in zip(("rotary", "local_rotary"), kinds, strict=True):
        matching_layers = [
            n for n, window in enumerate(windows) if bool(window) == (name != "rotary")
        ]
        width = values["head_width"]
        if matching_layers and values.get("shapes"):
            width = values["shapes"][matching_layers[0]].head_width
        layer_rope = rope.get(kind) or {}
        if name == "rotary" or family.name == "modernbert":
            layer_rope = {**layer_rope, **scaling}
        partial = "partial_rotary_factor" in family.settings
        sizes = {**values, "head_width": width}
        rotaries[name] = _rotary(
            layer_rope, bases[kind], full.get("partial_rotary_factor"), sizes, partial=partial
        )
    return rotaries


def _default_bases(family: Family, full: Raw) -> dict[str, float]:
    """Default rope_theta of each kind of layer."""
    if family.name == "modernbert":
        keys = ("global_rope_theta", "local_rope_theta")
    elif family.name == "gemma3":
        keys = ("rope_theta", "rope_local_base_freq")
    else:
        keys = ("rope_theta", "rope_theta")
    return {
        kind: 10000.0 if full.get(key) is None else full[key]
        for kind, key in zip(("full_attention", "sliding_attention"), keys, strict=True)
    }


def rope_from_hf(full: Raw, head_width: int) -> Rotary:
    """RoPE settings of a Llama-like layer that is not a model: a drafting head."""
    check_types(full, ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings"))
    rope = full.get("rope_scaling") or full.get("rope_parameters") or {}
    base, context = full.get("rope_theta") or 10000.0, full.get("max_position_embeddings") or 2048
    return _rotary(rope, base, None, {"context": context, "head_width": head_width}, partial=True)


def _rotary(
    rope: Raw, base: float | None, share: float | None, values: Mapping[str, Any], *, partial: bool
) -> Rotary:
    """Convert RoPE settings.

    Args:
        rope: The settings in config.json.
        base: Default of rope_theta.
        share: Default of partial_rotary_factor.
        values: The fields of ModelConfig so far.
        partial: Whether the family supports partial rotation of heads.
    """
    check_types(rope, _ROPE_KEYS, "config.json, rope_parameters")
    kind = rope.get("rope_type", rope.get("type")) or "default"
    kind = {"default": "none", "mrope": "none", "su": "longrope"}.get(kind, kind)
    share = share if rope.get("partial_rotary_factor") is None else rope["partial_rotary_factor"]
    if share is None or not (partial or kind == "proportional"):
        share = 1.0
    base = base if rope.get("rope_theta") is None else rope["rope_theta"]
    if base is None:
        raise ModelFileError("config.json: rope_theta must be a number, got null")
    original, context = rope.get("original_max_position_embeddings"), values["context"]
    settings: dict[str, Any] = {
        "width": int(values["head_width"] * share),
        "base": float(base),
        "scaling": kind,
        "factor": float(rope.get("factor") or context / (original or context)),
        "original_context": int(original or context),
    }
    if kind == "none":
        settings["factor"] = 1.0
    elif kind == "proportional":
        settings.update(width=values["head_width"], share=float(share))
        settings["factor"] = float(rope.get("factor") or 1.0)
    elif kind == "dynamic":
        settings["original_context"] = context
    elif kind == "yarn":
        settings["attention_factor"] = _yarn_attention(rope, settings["factor"])
        settings["beta_fast"] = float(rope.get("beta_fast") or 32)
        settings["beta_slow"] = float(rope.get("beta_slow") or 1)
        settings["whole_dimensions"] = bool(rope.get("truncate", True))
    elif kind == "llama3":
        settings["low_frequency"] = float(_needed(rope, "low_freq_factor"))
        settings["high_frequency"] = float(_needed(rope, "high_freq_factor"))
    elif kind == "longrope":
        settings["short_factors"] = tuple(float(f) for f in _needed(rope, "short_factor"))
        settings["long_factors"] = tuple(float(f) for f in _needed(rope, "long_factor"))
        settings["attention_factor"] = rope.get("attention_factor") or longrope_attention(
            settings["factor"], settings["original_context"]
        )
    elif kind != "linear":
        raise ModelFileError(
            f"the position scaling {kind!r} is not supported; these are: "
            "linear, dynamic, yarn, llama3, longrope, proportional"
        )
    return Rotary(**settings)


def _needed(rope: Raw, key: str) -> Any:
    if rope.get(key) is None:
        raise ModelFileError(f"config.json, rope_parameters: {key} must be {_TYPE_OF[key]}")
    return rope[key]


def _yarn_attention(rope: Raw, factor: float) -> float:
    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope["mscale"]) / grown(rope["mscale_all_dim"])
    return grown(1.0)


def longrope_attention(factor: float, original: int) -> float:
    """Attention factor of LongRoPE, as in its paper."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


# -- writing --------------------------------------------------------------------------------


def config_to_hf(config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """A config.json from which transformers builds the same model."""
    if config.family not in FAMILIES or needs_unspool_format(config):
        return {"model_type": OUR_MODEL_TYPE, "settings": config.to_dict()}
    family = FAMILIES[config.family]
    raw: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        "pad_token_id": None,  # some families' default is outside a smaller vocabulary
    }
    for setting, key in family.keys.items():
        raw.setdefault(key, getattr(config, setting))
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if raw.get(key) == 0:
            raw[key] = None
    hf_activations = {
        setting: hf_name for hf_name, setting in _ACTIVATIONS.items()
    }  # last alias wins
    raw[family.keys["activation"]] = hf_activations.get(config.activation, "silu")
    raw.update(_windows_to_hf(family, config))
    if config.rotary is not None and config.local_rotary is not None:
        raw["rope_parameters"] = {
            "full_attention": _rope_to_hf(config.rotary, config),
            "sliding_attention": _rope_to_hf(config.local_rotary, config),
        }
    elif config.rotary is not None:
        raw["rope_parameters"] = _rope_to_hf(config.rotary, config)
    if family.name in ("gemma2", "gemma3"):
        raw["query_pre_attn_scalar"] = round(config.scale**-2)  # transformers needs an integer
    if family.name == "phi3" and config.rotary is not None:
        raw["original_max_position_embeddings"] = config.rotary.original_context
    if family.name == "gpt2":
        first = config.score_scale(0)
        raw["scale_attn_weights"] = not math.isclose(first, 1.0)
        raw["scale_attn_by_inverse_layer_idx"] = bool(config.attention_scales)
    if family.name == "smollm3":
        raw["no_rope_layers"] = [
            int(i not in config.unrotated_layers) for i in range(config.layers)
        ]
    if family.name in ("qwen3-moe", "qwen3-next"):
        raw["mlp_only_layers"] = list(config.dense_layers)
    for key, value in extra_settings_to_hf(config).items():
        raw[key] = {**raw[key], **value} if key == "rope_parameters" else value
    if family.name == "roberta":
        raw[family.keys["context"]] = config.context + ROBERTA_RESERVED
    if family.name in ("bert", "roberta"):
        raw["type_vocab_size"] = 1  # the position table already includes the token type's vector
    raw.update(recurrent_to_hf(config))
    raw.update({key: v for key, v in family.only.items() if v is not None})
    looks_ahead = config.sight == "whole" and "sight" not in family.fixed
    if looks_ahead and config.mask_id is None:  # diffusion models: only under "unspool"
        is_gemma3 = family.name == "gemma3"
        raw.update({"use_bidirectional_attention": True} if is_gemma3 else {"is_causal": False})
    if config.sight != "causal" or config.mask_id is not None:
        raw["unspool"] = {name: getattr(config, name) for name in _SIGHT}
    if config.end_ids:
        raw["eos_token_id"] = list(config.end_ids) if len(config.end_ids) > 1 else config.end_ids[0]
    return raw


def _windows_to_hf(family: Family, config: ModelConfig) -> dict[str, Any]:
    if not config.windows:
        return {"sliding_window": None} if "sliding_window" in family.defaults else {}
    words = ("full_attention", "sliding_attention")
    raw: dict[str, Any] = {"layer_types": [words[w > 0] for w in config.windows]}
    window = max(config.windows)
    if config.sight == "whole":
        halved = family.name in ("modernbert", "gemma3")
        window = 2 * (window - 1) if halved else window - 1
    raw["local_attention" if family.name == "modernbert" else "sliding_window"] = window
    if family.window_needs_switch:
        raw["use_sliding_window"] = True
    return raw


def _rope_to_hf(rotary: Rotary, config: ModelConfig) -> dict[str, Any]:
    kind = "default" if rotary.scaling == "none" else rotary.scaling
    raw: dict[str, Any] = {"rope_type": kind, "rope_theta": rotary.base}
    if kind == "proportional":
        raw["partial_rotary_factor"] = rotary.share
    elif rotary.width not in {config.shape(layer).head_width for layer in range(config.layers)}:
        raw["partial_rotary_factor"] = rotary.width / config.head_width
    if kind == "default":
        return raw
    raw["factor"] = rotary.factor
    if kind in ("yarn", "llama3", "longrope"):
        raw["original_max_position_embeddings"] = rotary.original_context
    if kind in ("yarn", "longrope"):
        raw["attention_factor"] = rotary.attention_factor
    if kind == "yarn":
        raw.update(beta_fast=rotary.beta_fast, beta_slow=rotary.beta_slow)
        raw["truncate"] = rotary.whole_dimensions
    if kind == "llama3":
        raw["low_freq_factor"] = rotary.low_frequency
        raw["high_freq_factor"] = rotary.high_frequency
    if kind == "longrope":
        raw["short_factor"] = list(rotary.short_factors)
        raw["long_factor"] = list(rotary.long_factors)
    return raw


# -- Settings of diffusion checkpoints that config.json lacks: mask token and block size


# Spellings to try if no file names the mask token, as in the oldest BERTs.
_COMMON_MASKS = ("[MASK]", "<mask>", "<|mask|>", "|<MASK>|", "<|mdm_mask|>")
_BD3LM_BLOCK = 32  # tokens of a block in dllm's bd3lm models


def add_block_from_name(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Add the block size of dllm's block-diffusion models, which can be told from its other models
    only by `bd3lm` in the path."""
    lacks_block = str(raw.get("model_type")).startswith("a2d-") and raw.get("block_size") is None
    if lacks_block and "bd3lm" in str(folder.resolve()):
        return {**raw, "block_size": _BD3LM_BLOCK}
    return raw


def has_mask_setting(raw: Mapping[str, Any]) -> bool:
    """Whether config.json has the mask token."""
    return raw.get("mask_token_id") is not None or "unspool" in raw


def find_mask_id(folder: Path) -> int | None:
    """The id of the mask token in a folder's vocabulary; None: it has none."""
    try:
        ids, name = _numbers(folder), _named(folder)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelFileError(f"{folder}: invalid tokenizer files ({error!r})") from None
    return next((ids[token] for token in ([name] if name else _COMMON_MASKS) if token in ids), None)


def _named(folder: Path) -> str | None:
    """The text of the mask token, if a file names it."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read(folder, file).get("mask_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str) and text:
            return text
    return None


def _numbers(folder: Path) -> dict[str, int]:
    """All tokens that the files list, with their ids."""
    vocabulary = _read(folder, "tokenizer.json")
    vocab = (vocabulary.get("model") or {}).get("vocab") or _read(folder, "vocab.json")
    ids: dict[str, int] = dict(vocab) if isinstance(vocab, Mapping) else {}
    ids |= {token["content"]: int(token["id"]) for token in vocabulary.get("added_tokens") or []}
    added_tokens = _read(folder, "tokenizer_config.json").get("added_tokens_decoder") or {}
    return ids | {token["content"]: int(token_id) for token_id, token in added_tokens.items()}


def _read(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}
