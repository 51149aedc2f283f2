"""config.json, as transformers writes it, to our ModelConfig and back.

The simple settings are tables in `families.py`. What is left here needs a thought: which layers
have a window, how positions are scaled, where old files say the same thing in another way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unspool.errors import ModelFileError
from unspool.model.config import ModelConfig
from unspool.model.families import FAMILIES, family_of_model_type
from unspool.model.family import Family
from unspool.model.mamba_config import nemotron_names
from unspool.model.positions import Rotary
from unspool.model.quantized import scheme_of
from unspool.model.recurrent_config import only_ours, recurrent_from_hf, recurrent_to_hf
from unspool.model.today_config import read_today, write_today

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
OUR_MODEL_TYPE = "unspool"  # checkpoints of our own say everything in our words
ROBERTA_RESERVED = 2  # positions that no text has: the table's count begins behind the padding's
# How far tokens look: what transformers has no words for stands in our own, under "unspool".
_SIGHT = ("sight", "block", "mask_id", "shifted")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a sentence about what is wrong with it."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not valid JSON ({error}); download it again") from error
    if not isinstance(loaded, dict):
        raise ModelFileError(f"{path}: holds a {type(loaded).__name__} where an object is needed")
    return loaded


def config_from_hf(raw: Raw) -> ModelConfig:
    """The settings in a config.json."""
    if "model_type" not in raw:
        raise ModelFileError("config.json does not say its model_type; is this a language model?")
    if raw["model_type"] == OUR_MODEL_TYPE:
        return ModelConfig.from_dict(dict(raw.get("settings", {})))
    scheme_of(raw)  # refuses what cannot be read
    if "text_config" in raw:  # a model that also sees pictures: we read its language part
        raw = _language_part(raw)
    family = family_of_model_type(raw["model_type"])
    try:
        return ModelConfig(family=family.name, **_settings(family, raw))
    except (TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise ModelFileError(
            f"config.json cannot be understood as a {family.name} model: {error!r}"
        ) from error


def _language_part(raw: Raw) -> Raw:
    """What a model that sees pictures says of the part that reads and writes text."""
    text = {"model_type": raw["model_type"], **raw["text_config"]}
    if "tie_word_embeddings" in raw:  # its head is not within that part
        text["tie_word_embeddings"] = raw["tie_word_embeddings"]
    return {**text, "eos_token_id": _end_ids(raw) or _end_ids(text)}


def _settings(family: Family, raw: Raw) -> dict[str, Any]:
    """Every field of ModelConfig but the family's name."""
    raw = _usual_names(family, raw)
    full = {**family.defaults, **{key: v for key, v in raw.items() if v is not None}}
    if raw.get("num_experts") is None and "num_local_experts" in full:
        full["num_experts"] = full["num_local_experts"]
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in raw and raw[key] is None:  # silence means the default, null means none
            full[key] = 0.0
    values: dict[str, Any] = {ours: full[key] for ours, key in family.keys.items() if key in full}
    for key, wanted in family.only.items():
        if full.get(key, wanted) != wanted:
            raise ModelFileError(
                f"config.json says {key} is {full[key]!r}; a {family.name} model is supported only "
                + (f"where it is {wanted!r}" if wanted is not None else "without it")
            )
    for needed in ("vocab_size", "width", "layers", "heads", "context"):
        if needed not in values:
            raise ModelFileError(f"config.json lacks {family.keys[needed]!r}; it is incomplete")
        if not isinstance(values[needed], int) or values[needed] <= 0:
            raise ModelFileError(
                f"config.json says {family.keys[needed]} is {values[needed]!r}; "
                "a number of at least 1 is needed"
            )
    values.update(family.fixed)
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("head_width", values["width"] // values["heads"])
    values.setdefault("ff_width", 4 * values["width"])
    activation = full.get(family.keys["activation"], values["activation"])
    if activation not in _ACTIVATIONS:
        raise ModelFileError(
            f"the activation {activation!r} is not supported; these are: {', '.join(_ACTIVATIONS)}"
        )
    if full.get("classifier_activation", activation) != activation:
        raise ModelFileError("config.json names two activations, and one is supported")
    values["activation"] = family.fixed.get("activation", _ACTIVATIONS[activation])
    values["windows"] = _windows(family, full, values["layers"])
    values["end_ids"] = _end_ids(raw)
    values.update(_sight(family, raw, values))
    values.update(recurrent_from_hf(family, full, values))
    values.update(read_today(family, full, values))
    if values.get("positions", "rotary") == "rotary":
        values.update(_rotations(family, full, values))
    if family.name in ("gemma2", "gemma3"):
        values["embedding_scale"] = math.sqrt(values["width"])
        values["attention_scale"] = full["query_pre_attn_scalar"] ** -0.5
    if family.name == "smollm3":
        values["unrotated_layers"] = _unrotated(full, values["layers"])
    if family.name in ("qwen3-moe", "qwen3-next"):
        values["dense_layers"] = _dense_layers(full, values["layers"])
    if family.name == "roberta":
        values["context"] -= ROBERTA_RESERVED
    return values


def _sight(family: Family, raw: Raw, values: Mapping[str, Any]) -> dict[str, Any]:
    """How far tokens look, and the mask token; a checkpoint of our own says it in our words."""
    found: dict[str, Any] = {}
    if "block" in family.keys:
        found["sight"] = "block" if values.get("block") else "whole"
    if values.get("mask_id") is None and (family.mask_id or 0) < values["vocab_size"]:
        found["mask_id"] = family.mask_id
    return found | {name: v for name, v in raw.get("unspool", {}).items() if name in _SIGHT}


def _usual_names(family: Family, raw: Raw) -> Raw:
    """What a few families say in words of their own, in those of the others."""
    if family.name == "llada":
        ratio = raw.get("mlp_ratio", 4)
        size = {"embedding_size": raw.get("embedding_size") or raw.get("vocab_size")}
        width = {"mlp_hidden_size": raw.get("mlp_hidden_size") or ratio * raw.get("d_model", 0)}
        return {**raw, **size, **width}
    if family.name == "nemotron-h":
        return nemotron_names(raw)
    if family.name == "modernbert":
        full = {**family.defaults, **raw}
        return {
            **raw,
            "sliding_window": full["local_attention"] // 2 + 1,
            "rope_theta": full["global_rope_theta"],
            "rope_local_base_freq": full["local_rope_theta"],
        }
    return raw


def _end_ids(raw: Raw) -> tuple[int, ...]:
    ends = raw.get("eos_token_id")
    several = ends if isinstance(ends, list | tuple) else [ends]
    return tuple(int(end) for end in several if end is not None)


def _unrotated(full: Raw, layers: int) -> tuple[int, ...]:
    flags = full.get("no_rope_layers")
    if flags is None:
        every = full["no_rope_layer_interval"]
        flags = [int((layer + 1) % every != 0) for layer in range(layers)]
    return tuple(layer for layer, rotated in enumerate(flags) if not rotated)


def _dense_layers(full: Raw, layers: int) -> tuple[int, ...]:
    dense = set(full.get("mlp_only_layers", []))
    every = full["decoder_sparse_step"]
    dense.update(layer for layer in range(layers) if (layer + 1) % every)
    return tuple(sorted(dense))


def _windows(family: Family, full: Raw, layers: int) -> tuple[int, ...]:
    """How many last tokens each layer sees; empty if all see everything."""
    window = full.get("sliding_window")
    if not window or (family.window_needs_switch and not full.get("use_sliding_window", False)):
        return ()
    kinds = full.get("layer_types")
    pattern = int(full.get("sliding_window_pattern", full.get("_sliding_window_pattern", 6)))
    unrotated = _unrotated(full, layers) if family.window_layers == "unrotated" else ()

    def has_window(layer: int) -> bool:
        if kinds is not None:
            return bool(kinds[layer] == "sliding_attention")
        if family.window_layers == "later":
            return layer >= int(full["max_window_layers"])
        if family.window_layers == "every second":
            return layer % 2 == 0
        if family.window_layers == "three of four":
            return (layer + 1) % 4 != 0
        if family.window_layers == "five of six":
            return (layer + 1) % pattern != 0
        if family.window_layers == "but every nth":
            return layer % int(full["global_attn_every_n_layers"]) != 0
        return family.window_layers == "all" or layer in unrotated

    found = tuple(int(window) if has_window(layer) else 0 for layer in range(layers))
    return found if any(found) else ()


# -- rotary positions -----------------------------------------------------------------------


def _rotations(family: Family, full: Raw, values: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings: one for all layers, or (Gemma 3) another for layers with a window."""
    rope = full.get("rope_parameters") or {}
    if "full_attention" in rope:
        windows = values["windows"] or (0,) * values["layers"]
        found = {}
        for name, kind in (("rotary", "full_attention"), ("local_rotary", "sliding_attention")):
            at = [n for n, window in enumerate(windows) if bool(window) == (name != "rotary")]
            width = values["head_width"]
            if at and values.get("shapes"):
                width = values["shapes"][at[0]].head_width
            if kind in rope:
                found[name] = _rotary(rope[kind], full, {**values, "head_width": width})
        return found
    if not rope:
        rope = {**(full.get("rope_scaling") or {}), "rope_theta": full["rope_theta"]}
    found = {"rotary": _rotary(rope, full, values)}
    if family.name == "olmo3":  # only layers that see everything are scaled
        plain = {"rope_theta": rope.get("rope_theta", full["rope_theta"])}
        found["local_rotary"] = _rotary(plain, full, values)
    if "rope_local_base_freq" in full:
        found["local_rotary"] = _rotary({"rope_theta": full["rope_local_base_freq"]}, full, values)
    return found


def rotary_of(full: Raw, head_width: int) -> Rotary:
    """How one layer of a Llama turns its heads, for what is no whole model: a drafting head."""
    rope = full.get("rope_parameters") or {
        **(full.get("rope_scaling") or {}), "rope_theta": full.get("rope_theta", 10000.0),
    }  # fmt: skip
    context = int(full.get("max_position_embeddings", 2048))
    return _rotary(rope, full, {"context": context, "head_width": head_width})


def _rotary(rope: Raw, full: Raw, values: Mapping[str, Any]) -> Rotary:
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = {"default": "none", "mrope": "none", "su": "longrope"}.get(kind, kind)
    share = rope.get("partial_rotary_factor")
    if share is None:
        share = full.get("rotary_pct", full.get("partial_rotary_factor", 1.0))
    original = rope.get(
        "original_max_position_embeddings", full.get("original_max_position_embeddings")
    )
    context = values["context"]
    settings: dict[str, Any] = {
        "width": int(values["head_width"] * share),
        "base": float(rope.get("rope_theta", full.get("rope_theta", 10000.0))),
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
        settings["low_frequency"] = float(rope["low_freq_factor"])
        settings["high_frequency"] = float(rope["high_freq_factor"])
    elif kind == "longrope":
        settings["short_factors"] = tuple(float(f) for f in rope["short_factor"])
        settings["long_factors"] = tuple(float(f) for f in rope["long_factor"])
        settings["attention_factor"] = rope.get("attention_factor") or longrope_attention(
            settings["factor"], settings["original_context"]
        )
    elif kind != "linear":
        raise ModelFileError(
            f"the position scaling {kind!r} is not supported; these are: "
            "linear, dynamic, yarn, llama3, longrope, proportional"
        )
    return Rotary(**settings)


def _yarn_attention(rope: Raw, factor: float) -> float:
    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope["mscale"]) / grown(rope["mscale_all_dim"])
    return grown(1.0)


def longrope_attention(factor: float, original: int) -> float:
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


# -- writing --------------------------------------------------------------------------------


def config_to_hf(config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """A config.json from which transformers builds the same model."""
    if config.family not in FAMILIES or only_ours(config):
        return {"model_type": OUR_MODEL_TYPE, "settings": config.to_dict()}
    family = FAMILIES[config.family]
    raw: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        "pad_token_id": None,  # some families' default lies outside a smaller vocabulary
    }
    for ours, key in family.keys.items():
        raw.setdefault(key, getattr(config, ours))
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if raw.get(key) == 0:
            raw[key] = None
    names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}  # the last name of each wins
    raw[family.keys["activation"]] = names.get(config.activation, "silu")
    if config.windows:
        kinds = {0: "full_attention"}
        raw["layer_types"] = [kinds.get(w, "sliding_attention") for w in config.windows]
        if family.name == "modernbert":
            raw["local_attention"] = 2 * (max(config.windows) - 1)
        else:
            raw["sliding_window"] = max(config.windows)
        if family.window_needs_switch:
            raw["use_sliding_window"] = True
    elif "sliding_window" in family.defaults:
        raw["sliding_window"] = None
    if config.rotary is not None and config.local_rotary is not None:
        raw["rope_parameters"] = {
            "full_attention": _rope_to_hf(config.rotary, config),
            "sliding_attention": _rope_to_hf(config.local_rotary, config),
        }
    elif config.rotary is not None:
        raw["rope_parameters"] = _rope_to_hf(config.rotary, config)
    if family.name in ("gemma2", "gemma3"):
        raw["query_pre_attn_scalar"] = round(config.scale**-2)  # transformers wants a whole one
    if family.name == "smollm3":
        raw["no_rope_layers"] = [
            int(i not in config.unrotated_layers) for i in range(config.layers)
        ]
    if family.name in ("qwen3-moe", "qwen3-next"):
        raw["mlp_only_layers"] = list(config.dense_layers)
    for key, value in write_today(config).items():
        raw[key] = {**raw[key], **value} if key == "rope_parameters" else value
    if family.name == "roberta":
        raw[family.keys["context"]] = config.context + ROBERTA_RESERVED
    if family.name in ("bert", "roberta"):
        raw["type_vocab_size"] = 1  # the table of positions holds the type's vector already
    raw.update(recurrent_to_hf(config))
    raw.update({key: v for key, v in family.only.items() if v is not None})
    if config.sight != "causal" or config.mask_id is not None:
        raw["unspool"] = {name: getattr(config, name) for name in _SIGHT}
    if config.end_ids:
        raw["eos_token_id"] = list(config.end_ids) if len(config.end_ids) > 1 else config.end_ids[0]
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
