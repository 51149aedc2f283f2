"""Settings of recurrent layers, from config.json or GGUF metadata, and back to config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unspool.model.config import ModelConfig
from unspool.model.family import Family, check_length
from unspool.model.gguf import GGUFFile
from unspool.model.mamba_config import mamba_from_gguf, mamba_from_hf, mamba_to_hf
from unspool.model.recurrence import Recurrence

CONVOLUTIONS = ("lfm2", "lfm2-moe")
DELTAS = ("qwen3.5", "qwen3.5-moe", "qwen3-next")
_MIXER_OF = {"conv": "conv", "linear_attention": "delta"}
_DELTA_KEYS = {
    "conv_kernel": "linear_conv_kernel_dim",
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_width": "linear_key_head_dim",
    "value_width": "linear_value_head_dim",
}


def recurrent_from_hf(
    family: Family, full: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of recurrent layers in a config.json; empty for families without them."""
    layers = values["layers"]
    if family.name in CONVOLUTIONS:
        attention_layers = full.get("full_attn_idxs")
        kinds = full.get("layer_types") or [
            "full_attention" if attention_layers is None or layer in attention_layers else "conv"
            for layer in range(layers)
        ]
        check_length("layer_types", kinds, layers)
        settings: dict[str, Any] = {"recurrence": Recurrence(conv_kernel=full["conv_L_cache"])}
        if family.name == "lfm2":
            settings["ff_width"] = _adjusted_width(full)
        else:
            settings["dense_layers"] = tuple(range(min(layers, full["num_dense_layers"])))
        settings["tied"] = bool(full.get("tie_embedding", values["tied"]))
    elif family.name in DELTAS:
        interval = full["full_attention_interval"]
        kinds = full.get("layer_types") or [
            "linear_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(layers)
        ]
        check_length("layer_types", kinds, layers)
        settings = {"recurrence": Recurrence(**{o: full[key] for o, key in _DELTA_KEYS.items()})}
    else:
        return mamba_from_hf(family, full, values)
    return {**settings, "mixers": tuple(_MIXER_OF.get(kind, "attention") for kind in kinds)}


def _adjusted_width(full: Mapping[str, Any]) -> int:
    """Inner width of LFM2's feed-forward; config.json has the width before adjustment."""
    width = int(full.get("block_ff_dim") or full["intermediate_size"])
    if not full["block_auto_adjust_ff_dim"]:
        return width
    width = int(full["block_ffn_dim_multiplier"] * int(2 * width / 3))
    multiple = int(full["block_multiple_of"])
    return -(-width // multiple) * multiple


def recurrent_to_hf(config: ModelConfig) -> dict[str, Any]:
    if config.family in ("granite-hybrid", "nemotron-h"):
        return mamba_to_hf(config)
    recurrence = config.recurrence
    if recurrence is None:
        return {}
    layer_type_of = {mixer: key for key, mixer in _MIXER_OF.items()}
    raw: dict[str, Any] = {
        "layer_types": [layer_type_of.get(mixer, "full_attention") for mixer in config.mixers]
    }
    if config.family == "lfm2":
        raw["block_auto_adjust_ff_dim"] = False
    if config.family == "lfm2-moe":
        raw["num_dense_layers"] = len(config.dense_layers)
    if config.family in CONVOLUTIONS:
        return {**raw, "conv_L_cache": recurrence.conv_kernel}
    return {**raw, **{key: getattr(recurrence, o) for o, key in _DELTA_KEYS.items()}}


def needs_unspool_format(config: ModelConfig) -> bool:
    """Whether transformers' config.json cannot express this model: its value heads are in the order
    of GGUF files, or its Mamba-2 norm and keys have different groups."""
    recurrence = config.recurrence
    if recurrence is None:
        return False
    grouped = "mamba2" in config.mixers and recurrence.norm_groups != recurrence.key_heads
    return recurrence.tiled or grouped


# -- GGUF -----------------------------------------------------------------------------------


def recurrent_from_gguf(
    family: Family, file: GGUFFile, number: Callable[..., Any], layers: int
) -> dict[str, Any]:
    """The same from a GGUF file; `number` reads metadata. Recurrent layers are detected from their
    tensors."""

    def mixer(layer: int) -> str:
        if f"blk.{layer}.shortconv.conv.weight" in file.tensors:
            return "conv"
        return "delta" if f"blk.{layer}.ssm_conv1d.weight" in file.tensors else "attention"

    if family.name in CONVOLUTIONS:
        recurrence = Recurrence(conv_kernel=number("shortconv.l_cache"))
    elif family.name in DELTAS:
        heads, groups = number("ssm.time_step_rank"), number("ssm.group_count")
        recurrence = Recurrence(
            conv_kernel=number("ssm.conv_kernel"),
            key_heads=groups,
            value_heads=heads,
            key_width=number("ssm.state_size"),
            value_width=number("ssm.inner_size") // max(1, heads),
            tiled=family.name != "qwen3-next" and heads != groups,
        )
    else:
        return mamba_from_gguf(family, file, number, layers)
    settings: dict[str, Any] = {
        "mixers": tuple(mixer(layer) for layer in range(layers)), "recurrence": recurrence,
    }  # fmt: skip
    if family.name == "lfm2-moe":
        biases = (f"blk.{layer}.exp_probs_b.bias" in file.tensors for layer in range(layers))
        settings["selection_bias"] = any(biases)
        settings["experts_scale"] = number("expert_weights_scale", 1.0)
    if "shared_width" in family.keys:
        settings["shared_width"] = number("expert_shared_feed_forward_length", 0)
    return settings
