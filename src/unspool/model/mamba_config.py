"""Settings of Mamba-2 models, from config.json or GGUF metadata, and back to config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from unspool.errors import ModelFileError
from unspool.model.config import ModelConfig
from unspool.model.family import Family, check_length
from unspool.model.gguf import GGUFFile
from unspool.model.recurrence import Recurrence
from unspool.model.today_config import Raw

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
# Older spellings.
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
_WRITTEN = {"mamba2": "linear_attention", "attention": "full_attention"}
_NEMOTRON_KEYS = {
    "conv_kernel": "conv_kernel",
    "conv_bias": "use_conv_bias",
    "key_heads": "n_groups",
    "value_heads": "mamba_num_heads",
    "key_width": "ssm_state_size",
    "value_width": "mamba_head_dim",
    "norm_groups": "n_groups",
}
_GRANITE_KEYS = {
    "conv_kernel": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
    "key_heads": "mamba_n_groups",
    "value_heads": "mamba_n_heads",
    "key_width": "mamba_d_state",
    "value_width": "mamba_d_head",
    "norm_groups": "mamba_n_groups",  # each group is normalized separately
}
_EXPERT_KEYS = {
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
    "shared_width": "moe_shared_expert_intermediate_size",
    "normalize_experts": "norm_topk_prob",
    "experts_scale": "routed_scaling_factor",
}
# transformers clamps the time step of prompts from below, which is meant for initialization. The
# models themselves, and transformers token by token, have no such limit: write a negligible one.
_SMALLEST_STEP = {"time_step_min": 1e-20}


def list_nemotron_layers(raw: Raw) -> Raw:
    """Add the list of layer kinds (layers_block_type), which also gives their number."""
    kinds = raw.get("layers_block_type") or raw.get("layer_types")
    if kinds is None:
        pattern = raw.get("hybrid_override_pattern")
        if pattern is None:
            raise ModelFileError("config.json has no 'layers_block_type'; it is incomplete")
        kinds = [_LETTERS.get(letter, letter) for letter in pattern]
    head = raw.get("head_dim") or raw.get("attention_head_dim")
    return {**raw, "layers_block_type": kinds, "num_hidden_layers": len(kinds), "head_dim": head}


def mamba_from_hf(family: Family, full: Raw, values: Raw) -> dict[str, Any]:
    """Settings of Mamba-2 layers in a config.json; empty for families without them."""
    if family.name not in ("granite-hybrid", "nemotron-h"):
        return {}
    _check_steps(full)
    if family.name == "granite-hybrid":
        return _granite(full, values)
    kinds = [_KINDS.get(kind, kind) for kind in full["layers_block_type"]]
    unknown = sorted(set(kinds) - set(_LETTERS.values()))
    if unknown:
        raise ModelFileError(f"config.json: layers of kind {unknown[0]!r} are not supported")
    expert_settings = {
        setting: full[key] for setting, key in _EXPERT_KEYS.items() if "moe" in kinds
    }
    recurrence_settings = {setting: full[key] for setting, key in _NEMOTRON_KEYS.items()}
    return {
        **expert_settings,
        "mixers": _mixers(kinds),
        "recurrence": Recurrence(**recurrence_settings),
        "feedless_layers": _layers_of_kind(kinds, "mamba", "attention"),
        "dense_layers": _layers_of_kind(kinds, "mlp") if expert_settings else (),
    }


def _granite(full: Raw, values: Raw) -> dict[str, Any]:
    recurrence_settings = {setting: full[key] for setting, key in _GRANITE_KEYS.items()}
    if recurrence_settings["value_width"] == "auto":
        recurrence_settings["value_width"] = (
            full["mamba_expand"] * values["width"] // recurrence_settings["value_heads"]
        )
    layer_types = full.get("layer_types") or ["mamba"] * values["layers"]
    check_length("layer_types", layer_types, values["layers"])
    kinds = [_KINDS.get(kind, kind) for kind in layer_types]
    settings: dict[str, Any] = {
        "mixers": _mixers(kinds),
        "recurrence": Recurrence(**recurrence_settings) if "mamba" in kinds else None,
        "positions": "rotary" if full.get("position_embedding_type") == "rope" else "none",
        "logit_scale": 1 / full["logits_scaling"],
    }
    if not full["num_local_experts"]:
        return {**settings, "ff_width": full["shared_intermediate_size"]}
    return {
        **settings,
        "experts": full["num_local_experts"],
        "experts_per_token": full["num_experts_per_tok"],
        "expert_width": values["ff_width"],
        "shared_width": full["shared_intermediate_size"],
    }


def _mixers(kinds: list[str]) -> tuple[str, ...]:
    words = {"mamba": "mamba2", "attention": "attention"}
    return tuple(words.get(kind, "none") for kind in kinds)


def _layers_of_kind(kinds: list[str], *selected: str) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(kinds) if kind in selected)


def _check_steps(full: Raw) -> None:
    """Raise if the time step is limited; transformers writes infinity as an object."""
    limit = full.get("time_step_limit") or (0.0, math.inf)
    if not isinstance(limit, list | tuple) or len(limit) != 2:
        raise ModelFileError(f"config.json: time_step_limit must be two numbers, got {limit!r}")
    least, most = limit
    bounded = isinstance(most, int | float) and most < math.inf
    if not isinstance(least, int | float) or least > 0 or bounded:
        raise ModelFileError(f"config.json: time_step_limit must be [0, inf], got {[least, most]}")


def mamba_to_hf(config: ModelConfig) -> dict[str, Any]:
    if config.family == "granite-hybrid":
        return _granite_to_hf(config)
    kinds = [_WRITTEN.get(mixer, "") for mixer in config.mixers]
    feeds = ["moe" if config.has_experts(layer) else "mlp" for layer in range(config.layers)]
    raw: dict[str, Any] = {
        "layers_block_type": [kind or feed for kind, feed in zip(kinds, feeds, strict=True)],
        **_SMALLEST_STEP,
    }
    if config.experts:
        raw |= {key: getattr(config, setting) for setting, key in _EXPERT_KEYS.items()}
    return {**raw, **_recurrence_to_hf(config, _NEMOTRON_KEYS)}


def _granite_to_hf(config: ModelConfig) -> dict[str, Any]:
    raw = {
        "layer_types": [_WRITTEN[mixer] for mixer in config.mixers],
        "position_embedding_type": "rope" if config.positions == "rotary" else None,
        "logits_scaling": 1 / config.logit_scale,
        "attention_multiplier": config.scale,
        "num_local_experts": config.experts,
        "shared_intermediate_size": config.shared_width or config.ff_width,
    }
    if config.experts:
        raw |= {"num_experts_per_tok": config.experts_per_token}
        raw |= {"intermediate_size": config.expert_width}
    recurrence_settings = _recurrence_to_hf(config, _GRANITE_KEYS)
    if config.recurrence is not None:
        recurrence_settings["mamba_expand"] = config.recurrence.value_dim // config.width
    return {**raw, **recurrence_settings}


def _recurrence_to_hf(config: ModelConfig, keys: Mapping[str, str]) -> dict[str, Any]:
    if config.recurrence is None:
        return {}
    return {key: getattr(config.recurrence, setting) for setting, key in keys.items()}


# -- GGUF -----------------------------------------------------------------------------------


def mamba_from_gguf(
    family: Family, file: GGUFFile, number: Callable[..., Any], layers: int
) -> dict[str, Any]:
    """The same from a GGUF file; the kind of each layer is detected from its tensors."""
    if family.name not in ("granite-hybrid", "nemotron-h"):
        return {}

    def has(layer: int, *names: str) -> bool:
        return any(f"blk.{layer}.{name}.weight" in file.tensors for name in names)

    def switch(key: str, default: bool) -> bool:
        architecture = file.metadata["general.architecture"]
        return bool(file.metadata.get(f"{architecture}.{key}", default))

    kinds = ["mamba" if has(n, "ssm_in") else "attention" * has(n, "attn_q") for n in range(layers)]
    heads, groups = number("ssm.time_step_rank"), number("ssm.group_count")
    feeds = ("ffn_down", "ffn_down_exps")
    settings: dict[str, Any] = {
        "mixers": _mixers(kinds),
        "feedless_layers": tuple(n for n in range(layers) if not has(n, *feeds)),
        "recurrence": Recurrence(
            conv_kernel=number("ssm.conv_kernel"),
            conv_bias=any(f"blk.{n}.ssm_conv1d.bias" in file.tensors for n in range(layers)),
            key_heads=groups,
            value_heads=heads,
            key_width=number("ssm.state_size"),
            value_width=number("ssm.inner_size") // max(1, heads),
            norm_groups=groups,
        ),
    }
    if number("moe_latent_size", 0) or number("expert_group_count", 1) > 1:
        raise ModelFileError(
            f"{file.path}: expert groups and latent projections of experts are not supported"
        )
    if number("expert_count", 0):
        settings["shared_width"] = number("expert_shared_feed_forward_length", 0)
        settings["experts_scale"] = number("expert_weights_scale", 1.0)
        settings["normalize_experts"] = switch("expert_weights_norm", True)
    if family.name == "nemotron-h":
        return {**settings, "activation": "relu2"}
    has_rope = switch("rope.scaling.finetuned", False)
    return {**settings, "positions": "rotary" if has_rope else "none"}
