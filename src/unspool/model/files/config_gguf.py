"""Convert GGUF metadata to `ModelConfig`.

GGUF metadata has the sizes; the rest follows from the architecture. Biases and tied embeddings are
detected from the list of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from unspool.errors import ModelFileError, UnspoolError
from unspool.model.config import LARGEST_SIZES, LayerShape, ModelConfig, Rotary
from unspool.model.families.family import Family, gguf_rules
from unspool.model.families.registry import FAMILIES, family_of_gguf
from unspool.model.files.config_json import longrope_attention
from unspool.model.files.family_settings import (
    gemma_scales,
    max_sizes,
    query_growth,
    recurrent_from_gguf,
)
from unspool.model.files.gguf import ArchitectureMetadata, GGUFFile
from unspool.model.weights import TensorRule


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


_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
# Families whose query and key rows llama.cpp permutes, because it rotates adjacent dimensions.
_INTERLEAVED = (
    "llama", "mistral", "ministral3", "mixtral", "smollm3", "granite", "llada", "granite-hybrid",
    "nemotron-h",
)  # fmt: skip


def rules_for_gguf(config: ModelConfig) -> tuple[TensorRule, ...]:
    family_rules = FAMILIES[config.family].gguf_rules
    common_rules = gguf_rules(
        interleaved=config.family in _INTERLEAVED,
        plus_one=config.norm_plus_one,
        gated=config.attention_gate,
    )
    return (*family_rules, *common_rules)


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Convert the metadata of a GGUF file."""
    try:
        return ModelConfig(**_settings(file))
    except UnspoolError:
        raise
    except (
        TypeError, KeyError, ValueError, AttributeError, ArithmeticError, IndexError
    ) as error:  # fmt: skip
        raise ModelFileError(f"{file.path}: invalid metadata: {error!r}") from error


def _settings(file: GGUFFile) -> dict[str, Any]:
    """All fields of ModelConfig."""
    keys = ArchitectureMetadata(file)
    experts = int(keys.number("expert_count", 0))
    family = resolve_gguf_family(family_of_gguf(keys.architecture, experts), keys)
    layers, width = keys.number("block_count"), keys.number("embedding_length")
    layers -= keys.number("nextn_predict_layers", 0)  # multi-token prediction heads
    heads = keys.first("attention.head_count")
    for name, size in (("block_count", layers), ("embedding_length", width), ("heads", heads)):
        if not isinstance(size, int) or not 0 < size <= LARGEST_SIZES["width"]:
            raise ModelFileError(f"{file.path}: {name} is {size!r}; at least 1 is needed")
    if layers > LARGEST_SIZES["layers"]:
        raise ModelFileError(
            f"{file.path}: block_count must be at most {LARGEST_SIZES['layers']:,}, got {layers}"
        )
    shapes = layer_shapes(keys, layers, width)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError(
            f"{file.path}: no token_embd.weight: the file holds a vocabulary but no model"
        )
    head_width = keys.number("attention.key_length", width // heads)
    if keys.number("attention.value_length", head_width) != head_width:
        raise ModelFileError(f"{file.path}: keys and values of different width are not supported")
    eps = "layer_norm_rms_epsilon" if family.fixed.get("norm") != "layer" else "layer_norm_epsilon"
    values: dict[str, Any] = {
        "family": family.name,
        "vocab_size": embedding.shape[0],
        "width": width,
        "layers": layers,
        **shapes,
        "context": keys.number("context_length"),
        "norm_eps": keys.number(f"attention.{eps}"),
        "tied": "output.weight" not in file.tensors,
        "head_bias": "output.bias" in file.tensors,
        "qkv_bias": any(f"blk.0.attn_{part}.bias" in file.tensors for part in ("q", "qkv")),
        "out_bias": "blk.0.attn_output.bias" in file.tensors,
        "ff_bias": "blk.0.ffn_down.bias" in file.tensors,
        "windows": _windows(family, keys, layers),
        "activation": {"gpt2": "gelu_tanh", "gpt-neox": "gelu"}.get(family.name, "silu"),
        "end_ids": _end_ids(file),
        **family.fixed,
        **_sight(file, keys, family, embedding.shape[0]),
    }
    values.update(recurrent_from_gguf(family, file, keys.number, layers))
    if values.get("positions", "rotary") == "rotary":
        values["rotary"] = _rotary(file, keys, head_width)
    values.update(extra_settings_from_gguf(family, file, keys, values))
    if family.name == "gpt-neox":
        values["parallel"] = bool(keys.get("use_parallel_residual", True))
    if family.name in ("gemma2", "gemma3"):
        values.update(_gemma(family, keys, values))
    if family.name == "gpt-oss":
        values["rotary"] = replace(values["rotary"], whole_dimensions=False)
        values["activation_limit"] = family.defaults["swiglu_limit"]
    if family.name == "smollm3":
        values["unrotated_layers"] = tuple(range(3, layers, 4))
    if experts:
        values["experts"] = experts
        values["experts_per_token"] = keys.number("expert_used_count")
        values["expert_width"] = keys.number("expert_feed_forward_length", values["ff_width"])
        dense = [i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" not in file.tensors]
        values["dense_layers"] = tuple(dense)
    return values


def _end_ids(file: GGUFFile) -> tuple[int, ...]:
    ids = (file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(int(i) for i in ids if isinstance(i, int)))


def _sight(
    file: GGUFFile, keys: ArchitectureMetadata, family: Family, vocab_size: int
) -> dict[str, Any]:
    """Attention mask and mask token. llama.cpp assumes shifted logits in a bidirectional model
    unless diffusion.shift_logits is false."""
    if keys.get("attention.causal", family.fixed.get("sight") != "whole"):
        return {"sight": "causal", "shifted": False}
    mask = file.metadata.get("tokenizer.ggml.mask_token_id", family.mask_id)
    shifted = file.metadata.get("diffusion.shift_logits", family.name != "llada")
    is_token = isinstance(mask, int) and mask < vocab_size
    return {"sight": "whole", "mask_id": mask if is_token else None, "shifted": bool(shifted)}


def _windows(family: Family, keys: ArchitectureMetadata, layers: int) -> tuple[int, ...]:
    window = int(keys.number("attention.sliding_window", 0))
    if not window or not family.window_layers or family.window_needs_switch:
        return ()
    pattern = keys.file.metadata.get(f"{keys.architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):  # one flag for each layer
        flags = keys.per_layer("attention.sliding_window_pattern", layers)
        return tuple(window if flag else 0 for flag in flags)
    if isinstance(pattern, int) and not isinstance(pattern, bool):  # every n-th has no window
        return tuple(window if pattern and (n + 1) % pattern else 0 for n in range(layers))
    intervals = {"every second": 2, "three of four": 4, "five of six": 6, "listed": 4}
    interval = intervals.get(family.window_layers)
    if interval is None:
        return (window,) * layers
    return tuple(window if (layer + 1) % interval else 0 for layer in range(layers))


def _gemma(family: Family, keys: ArchitectureMetadata, values: dict[str, Any]) -> dict[str, Any]:
    """Settings of Gemma 2 and 3 that llama.cpp hard-codes."""
    width, heads, rotary = values["width"], values["heads"], values["rotary"]
    # Only the 27B models scale by width / heads; the metadata does not have it.
    largest = values["layers"] == {"gemma2": 46, "gemma3": 62}[family.name]
    settings: dict[str, Any] = {
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(width),
        "attention_scale": (width / heads if largest else values["head_width"]) ** -0.5,
    }
    for setting in ("attention_softcap", "logit_softcap"):
        if setting in family.keys:
            key = family.keys[setting]
            settings[setting] = float(keys.number(key, family.defaults.get(key) or 0.0))
    if family.name == "gemma3":
        base = float(keys.number("rope.freq_base_swa", 10000.0))
        settings["local_rotary"] = Rotary(width=rotary.width, base=base)
    return settings


def _rotary(file: GGUFFile, keys: ArchitectureMetadata, head_width: int) -> Rotary:
    width = int(keys.number("rope.dimension_count", head_width))
    base = float(keys.number("rope.freq_base", 10000.0))
    context = int(keys.number("context_length"))
    original = int(keys.number("rope.scaling.original_context_length", context))
    kind = keys.get("rope.scaling.type", "none")
    factor = float(keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0)))
    new_rotary = partial(Rotary, width=width, base=base)
    if "rope_factors_long.weight" in file.tensors:
        attention_factor = longrope_attention(context / original, original)
        return new_rotary(
            scaling="longrope",
            factor=context / original,
            original_context=original,
            attention_factor=float(keys.number("rope.scaling.attn_factor", attention_factor)),
            short_factors=_factors(file, "rope_factors_short.weight"),
            long_factors=_factors(file, "rope_factors_long.weight"),
        )
    if "rope_freqs.weight" in file.tensors:  # Llama 3: precomputed factors
        factors = _factors(file, "rope_freqs.weight")
        return new_rotary(
            scaling="longrope",
            original_context=context,
            short_factors=factors,
            long_factors=factors,
        )
    if kind == "yarn":
        attention_factor = yarn_attention_factor(factor, float(keys.number(_LOG_MULTIPLIER, 0.0)))
        return new_rotary(
            scaling="yarn",
            factor=factor,
            original_context=original,
            attention_factor=attention_factor * float(keys.number("rope.scaling.attn_factor", 1.0)),
            beta_fast=float(keys.number("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(keys.number("rope.scaling.yarn_beta_slow", 1.0)),
        )
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return new_rotary(scaling="linear", factor=factor)
    if kind != "none":
        raise ModelFileError(
            f"{file.path}: the position scaling {kind!r} is not supported; "
            "these are: none, linear, yarn, longrope"
        )
    return new_rotary()


def _factors(file: GGUFFile, name: str) -> tuple[float, ...]:
    if name not in file.tensors:
        raise ModelFileError(f"{file.path}: no {name}, which its RoPE scaling needs")
    return tuple(float(factor) for factor in file.float32(name).reshape(-1))
