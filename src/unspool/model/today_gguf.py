"""Settings of single families in GGUF metadata, where sizes may differ between layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unspool.model.config import LayerShape
from unspool.model.families import FAMILIES
from unspool.model.family import Family
from unspool.model.gguf import GGUFFile
from unspool.model.gguf_keys import ArchitectureMetadata
from unspool.model.positions import Rotary
from unspool.model.today_config import gemma_scales, max_sizes, query_growth


def resolve_gguf_family(family: Family, keys: ArchitectureMetadata) -> Family:
    """Resolve an architecture that several families share."""
    if family.name == "ministral3" and not keys.number("attention.temperature_scale", 0.0):
        return FAMILIES["mistral"]
    if family.gguf == "olmo2":  # also the architecture of OLMo 3
        return FAMILIES["olmo3" if keys.number("attention.sliding_window", 0) else "olmo2"]
    return family


def layer_shapes(keys: ArchitectureMetadata, layers: int, width: int) -> dict[str, Any]:
    """Sizes of heads and feed-forwards: the maxima, and each layer's if they differ."""
    heads = keys.per_layer("attention.head_count", layers)
    kv_heads = keys.per_layer("attention.head_count_kv", layers, heads[0])
    kv_heads = [count or max(kv_heads) for count in kv_heads]  # recurrent layers have none
    experts = keys.get("expert_feed_forward_length")  # some files have only this key
    ff_widths = keys.per_layer("feed_forward_length", layers, experts)
    ff_widths = [width or max(ff_widths) for width in ff_widths]  # as for layers without them
    full_width = keys.number("attention.key_length", width // heads[0])
    window_width = keys.number("attention.key_length_swa", full_width)
    windows = [0] * layers
    if window_width != full_width:
        windows = keys.per_layer("attention.sliding_window_pattern", layers, 0)
    shapes = tuple(
        LayerShape(
            heads=h, kv_heads=kv, head_width=window_width if window else full_width, ff_width=ff
        )
        for h, kv, ff, window in zip(heads, kv_heads, ff_widths, windows, strict=True)
    )
    return max_sizes(shapes)


def yarn_attention_factor(factor: float, log_multiplier: float) -> float:
    """Attention factor of YaRN."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(1.0) / (scale(log_multiplier) if log_multiplier else 1.0)


def extra_settings_from_gguf(
    family: Family, file: GGUFFile, keys: ArchitectureMetadata, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Further fields of ModelConfig for some families."""
    if family.name == "ministral3":
        span = keys.number("rope.scaling.original_context_length", values["context"])
        span = keys.number("attention.temperature_length", span)
        return query_growth(float(keys.number("attention.temperature_scale", 0.0)), int(span))
    if family.name in ("granite", "granite-hybrid"):
        return {
            "embedding_scale": float(keys.number("embedding_scale", 1.0)),
            "attention_scale": float(keys.number("attention.scale", 0.0)),
            "residual_scale": float(keys.number("residual_scale", 1.0)),
            "logit_scale": 1 / float(keys.number("logit_scale", 1.0)),
        }
    if family.name in ("olmo3", "mellum"):
        return {"local_rotary": _local_rotary(keys, values["rotary"])}
    if family.name == "gemma":
        return {**gemma_scales(values), "activation": "gelu_tanh"}
    if family.name == "gemma4":
        return _gemma4(file, keys, values)
    return {}


def _local_rotary(keys: ArchitectureMetadata, rotary: Rotary) -> Rotary:
    """RoPE of sliding-window layers, which is never scaled."""
    width = int(keys.number("rope.dimension_count_swa", rotary.width))
    return Rotary(width=width, base=float(keys.number("rope.freq_base_swa", rotary.base)))


def _gemma4(
    file: GGUFFile, keys: ArchitectureMetadata, values: Mapping[str, Any]
) -> dict[str, Any]:
    layers, shared = values["layers"], int(keys.number("attention.shared_kv_layers", 0))
    own_kv_layers = range(layers - shared)
    rotary = values["rotary"]
    if rotary.scaling == "longrope":  # unrotated pairs have a huge factor
        num_rotated = sum(factor < 1e9 for factor in rotary.short_factors)
        share = 2 * num_rotated / rotary.width
        rotary = Rotary(width=rotary.width, base=rotary.base, scaling="proportional", share=share)
    return {
        "rotary": rotary,
        "local_rotary": _local_rotary(keys, rotary),
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(values["width"]),
        "logit_softcap": float(keys.number("final_logit_softcapping", 0.0)),
        "kv_shared": shared,
        "keys_as_values": tuple(
            n for n in own_kv_layers if f"blk.{n}.attn_v.weight" not in file.tensors
        ),
        "token_width": int(keys.number("embedding_length_per_layer_input", 0)),
        "layer_scale": "blk.0.layer_output_scale.weight" in file.tensors,
        "dense_beside_experts": bool(keys.number("expert_count", 0)),
    }
