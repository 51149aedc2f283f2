"""Settings of the families of today that no table can say: in config.json and in GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unspool.errors import ModelFileError
from unspool.model.config import LayerShape, ModelConfig
from unspool.model.family import Family, check_length

Raw = Mapping[str, Any]


def read_today(family: Family, full: Raw, values: Raw) -> dict[str, Any]:
    """What else a config.json says of such a model."""
    if family.name == "ministral3":
        rope = full.get("rope_scaling") or full["rope_parameters"]
        grown = float(rope.get("llama_4_scaling_beta") or 0.0)
        original = full.get("original_max_position_embeddings")  # it wins, as in transformers
        original = original or rope.get("original_max_position_embeddings")
        return query_growth(grown, int(original or 0))
    if family.name == "granite":
        return {"logit_scale": 1 / full["logits_scaling"]}
    if family.name == "mellum":
        kinds = full.get("mlp_layer_types") or ["sparse"] * values["layers"]
        check_length("mlp_layer_types", kinds, values["layers"])
        return {"dense_layers": tuple(n for n, kind in enumerate(kinds) if kind == "dense")}
    if family.name == "gemma":
        # Files that say "gelu" mean its approximation, too.
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
        raise ModelFileError("a gemma4 model whose tokens all look both ways is not supported")
    if values["token_width"] and full.get("vocab_size_per_layer_input") not in (
        None,
        values["vocab_size"],
    ):
        raise ModelFileError(
            "config.json gives the tokens of each layer another vocabulary than the model's"
        )
    same = bool(full.get("attention_k_eq_v"))
    wide = {"head_dim": full["global_head_dim"]}
    if same and full.get("num_global_key_value_heads") is not None:
        wide["num_key_value_heads"] = full["num_global_key_value_heads"]
    told = full.get("per_layer_config")
    if told is None:
        told = {str(layer): wide for layer in range(layers) if not windows[layer]}
    for layer, own in told.items():
        known = isinstance(own, Mapping) and all(isinstance(v, int) for v in own.values())
        if not known or not own.keys() <= {"head_dim", "num_key_value_heads"}:
            raise ModelFileError(
                f"config.json: per_layer_config of layer {layer} may set head_dim and "
                f"num_key_value_heads to whole numbers, got {own!r}"
            )
    wider = 1 + bool(full.get("use_double_wide_mlp"))
    shared = range(layers - values["kv_shared"], layers) if values["kv_shared"] else range(0)
    shapes = tuple(
        LayerShape(
            heads=values["heads"],
            kv_heads=told.get(str(n), {}).get("num_key_value_heads", values["kv_heads"]),
            head_width=told.get(str(n), {}).get("head_dim", values["head_width"]),
            ff_width=values["ff_width"] * (wider if n in shared else 1),
        )
        for n in range(layers)
    )
    found = {**largest(shapes), "windows": windows, "embedding_scale": math.sqrt(values["width"])}
    full_layers = tuple(n for n in range(layers) if not windows[n])
    found["keys_as_values"] = full_layers if same else ()
    if full.get("enable_moe_block"):
        found.update(
            experts=full["num_experts"],
            experts_per_token=full["top_k_experts"],
            expert_width=full["moe_intermediate_size"],
            dense_beside_experts=True,
        )
    return found


def largest(shapes: tuple[LayerShape, ...]) -> dict[str, Any]:
    """The sizes of a model whose layers have these; the shapes themselves where they differ."""
    names = ("heads", "kv_heads", "head_width", "ff_width")
    found: dict[str, Any] = {name: max(getattr(s, name) for s in shapes) for name in names}
    return {**found, "shapes": shapes if len(set(shapes)) > 1 else ()}


# -- writing --------------------------------------------------------------------------------


def write_today(config: ModelConfig) -> dict[str, Any]:
    """What else transformers needs to build such a model."""
    if config.family == "ministral3" and config.rotary is not None:
        span = config.query_span or config.rotary.original_context
        told = {"llama_4_scaling_beta": config.query_growth}
        return {"rope_parameters": {**told, "original_max_position_embeddings": span}}
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
    usual = shapes[0]
    last = shapes[-1].ff_width
    found: dict[str, Any] = {
        "head_dim": usual.head_width,
        "num_key_value_heads": usual.kv_heads,
        "intermediate_size": usual.ff_width,
        "use_double_wide_mlp": bool(config.kv_shared) and last == 2 * usual.ff_width,
        "per_layer_config": {
            str(n): {"head_dim": shape.head_width, "num_key_value_heads": shape.kv_heads}
            for n, shape in enumerate(shapes)
            if (shape.head_width, shape.kv_heads) != (usual.head_width, usual.kv_heads)
        },
        "attention_k_eq_v": bool(config.keys_as_values),
        "vocab_size_per_layer_input": config.vocab_size,
        "enable_moe_block": config.experts > 0,
    }
    if config.experts:
        found.update(
            num_experts=config.experts,
            top_k_experts=config.experts_per_token,
            moe_intermediate_size=config.expert_width,
        )
    return found
