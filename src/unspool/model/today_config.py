"""Settings of single families that the tables cannot express, from config.json and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unspool.errors import ModelFileError
from unspool.model.config import LayerShape, ModelConfig
from unspool.model.family import Family, check_length

Raw = Mapping[str, Any]


def extra_settings_from_hf(family: Family, full: Raw, values: Raw) -> dict[str, Any]:
    """Further fields of ModelConfig for some families."""
    if family.name == "ministral3":
        rope = full.get("rope_scaling") or full["rope_parameters"]
        growth = float(rope.get("llama_4_scaling_beta") or 0.0)
        original = full.get("original_max_position_embeddings")  # takes precedence
        original = original or rope.get("original_max_position_embeddings")
        return query_growth(growth, int(original or 0))
    if family.name == "granite":
        return {"logit_scale": 1 / full["logits_scaling"]}
    if family.name == "mellum":
        kinds = full.get("mlp_layer_types") or ["sparse"] * values["layers"]
        check_length("mlp_layer_types", kinds, values["layers"])
        return {"dense_layers": tuple(n for n, kind in enumerate(kinds) if kind == "dense")}
    if family.name == "gemma":
        # "gelu" means the tanh approximation here, too.
        activation = {"gelu": "gelu_tanh"}.get(values["activation"], values["activation"])
        return {**gemma_scales(values), "activation": activation}
    if family.name == "gemma4":
        return _gemma4(full, values)
    return {}


def query_growth(growth: float, span: int) -> dict[str, Any]:
    return {"query_growth": growth, "query_span": span if growth else 0}


def gemma_scales(values: Raw) -> dict[str, Any]:
    return {
        "embedding_scale": math.sqrt(values["width"]),
        "attention_scale": values["head_width"] ** -0.5,
    }


# -- Gemma 4 --------------------------------------------------------------------------------


def _gemma4(full: Raw, values: Raw) -> dict[str, Any]:
    layers = values["layers"]
    windows = (*(values["windows"] or (0,) * layers)[:-1], 0)  # the last layer sees everything
    if full.get("use_bidirectional_attention") == "all":
        raise ModelFileError("a bidirectional gemma4 model is not supported")
    if values["token_width"] and full.get("vocab_size_per_layer_input") not in (
        None,
        values["vocab_size"],
    ):
        raise ModelFileError("config.json: vocab_size_per_layer_input must equal vocab_size")
    keys_are_values = bool(full.get("attention_k_eq_v"))
    global_layer = {"head_dim": full["global_head_dim"]}
    if keys_are_values and full.get("num_global_key_value_heads") is not None:
        global_layer["num_key_value_heads"] = full["num_global_key_value_heads"]
    layer_config = full.get("per_layer_config")
    if layer_config is None:
        layer_config = {str(layer): global_layer for layer in range(layers) if not windows[layer]}
    for layer, overrides in layer_config.items():
        is_valid = isinstance(overrides, Mapping) and all(
            isinstance(v, int) for v in overrides.values()
        )
        if not is_valid or not overrides.keys() <= {"head_dim", "num_key_value_heads"}:
            raise ModelFileError(
                f"config.json: per_layer_config of layer {layer} may set head_dim and "
                f"num_key_value_heads to whole numbers, got {overrides!r}"
            )
    wider = 1 + bool(full.get("use_double_wide_mlp"))
    sharing_layers = (
        range(layers - values["kv_shared"], layers) if values["kv_shared"] else range(0)
    )
    shapes = tuple(
        LayerShape(
            heads=values["heads"],
            kv_heads=layer_config.get(str(n), {}).get("num_key_value_heads", values["kv_heads"]),
            head_width=layer_config.get(str(n), {}).get("head_dim", values["head_width"]),
            ff_width=values["ff_width"] * (wider if n in sharing_layers else 1),
        )
        for n in range(layers)
    )
    settings = {
        **max_sizes(shapes),
        "windows": windows,
        "embedding_scale": math.sqrt(values["width"]),
    }
    full_layers = tuple(n for n in range(layers) if not windows[n])
    settings["keys_as_values"] = full_layers if keys_are_values else ()
    if full.get("enable_moe_block"):
        settings.update(
            experts=full["num_experts"],
            experts_per_token=full["top_k_experts"],
            expert_width=full["moe_intermediate_size"],
            dense_beside_experts=True,
        )
    return settings


def max_sizes(shapes: tuple[LayerShape, ...]) -> dict[str, Any]:
    """The maximum sizes over all layers; the shapes themselves if they differ."""
    names = ("heads", "kv_heads", "head_width", "ff_width")
    sizes: dict[str, Any] = {name: max(getattr(s, name) for s in shapes) for name in names}
    return {**sizes, "shapes": shapes if len(set(shapes)) > 1 else ()}


# -- writing --------------------------------------------------------------------------------


def extra_settings_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Further keys of config.json for some families."""
    if config.family == "ministral3" and config.rotary is not None:
        span = config.query_span or config.rotary.original_context
        growth = {"llama_4_scaling_beta": config.query_growth}
        return {"rope_parameters": {**growth, "original_max_position_embeddings": span}}
    if config.family == "granite":
        return {"logits_scaling": 1 / config.logit_scale, "attention_multiplier": config.scale}
    if config.family == "mellum":
        kinds = ("sparse", "dense")
        named = [kinds[layer in config.dense_layers] for layer in range(config.layers)]
        return {"mlp_layer_types": named}
    if config.family == "gemma4":
        return _write_gemma4(config)
    return {}


def _write_gemma4(config: ModelConfig) -> dict[str, Any]:
    shapes = [config.shape(layer) for layer in range(config.layers)]
    first_shape = shapes[0]
    last_ff_width = shapes[-1].ff_width
    raw: dict[str, Any] = {
        "head_dim": first_shape.head_width,
        "num_key_value_heads": first_shape.kv_heads,
        "intermediate_size": first_shape.ff_width,
        "use_double_wide_mlp": bool(config.kv_shared) and last_ff_width == 2 * first_shape.ff_width,
        "per_layer_config": {
            str(n): {"head_dim": shape.head_width, "num_key_value_heads": shape.kv_heads}
            for n, shape in enumerate(shapes)
            if (shape.head_width, shape.kv_heads) != (first_shape.head_width, first_shape.kv_heads)
        },
        "attention_k_eq_v": bool(config.keys_as_values),
        "vocab_size_per_layer_input": config.vocab_size,
        "enable_moe_block": config.experts > 0,
    }
    if config.experts:
        raw.update(
            num_experts=config.experts,
            top_k_experts=config.experts_per_token,
            moe_intermediate_size=config.expert_width,
        )
    return raw
