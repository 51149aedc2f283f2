"""Which layers recur and how, from a config.json or from GGUF metadata, and back."""

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
    """The settings of recurrent layers in a config.json; none for families without."""
    layers = values["layers"]
    if family.name in CONVOLUTIONS:
        attend = full.get("full_attn_idxs")
        kinds = full.get("layer_types") or [
            "full_attention" if attend is None or layer in attend else "conv"
            for layer in range(layers)
        ]
        check_length("layer_types", kinds, layers)
        found: dict[str, Any] = {"recurrence": Recurrence(conv_kernel=full["conv_L_cache"])}
        if family.name == "lfm2":
            found["ff_width"] = _adjusted_width(full)
        else:
            found["dense_layers"] = tuple(range(min(layers, full["num_dense_layers"])))
        found["tied"] = bool(full.get("tie_embedding", values["tied"]))
    elif family.name in DELTAS:
        every = full["full_attention_interval"]
        kinds = full.get("layer_types") or [
            "linear_attention" if (layer + 1) % every else "full_attention"
            for layer in range(layers)
        ]
        check_length("layer_types", kinds, layers)
        found = {"recurrence": Recurrence(**{o: full[key] for o, key in _DELTA_KEYS.items()})}
    else:
        return mamba_from_hf(family, full, values)
    return {**found, "mixers": tuple(_MIXER_OF.get(kind, "attention") for kind in kinds)}


def _adjusted_width(full: Mapping[str, Any]) -> int:
    """LFM2 files give the width of a feed-forward before it was made smaller."""
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
    words = {ours: theirs for theirs, ours in _MIXER_OF.items()}
    raw: dict[str, Any] = {
        "layer_types": [words.get(mixer, "full_attention") for mixer in config.mixers]
    }
    if config.family == "lfm2":
        raw["block_auto_adjust_ff_dim"] = False
    if config.family == "lfm2-moe":
        raw["num_dense_layers"] = len(config.dense_layers)
    if config.family in CONVOLUTIONS:
        return {**raw, "conv_L_cache": recurrence.conv_kernel}
    return {**raw, **{theirs: getattr(recurrence, o) for o, theirs in _DELTA_KEYS.items()}}


def only_ours(config: ModelConfig) -> bool:
    """Whether transformers cannot express this model: its value heads are in the order of GGUF
    files, or its Mamba-2 norm has other groups than its keys."""
    recurrence = config.recurrence
    if recurrence is None:
        return False
    grouped = "mamba2" in config.mixers and recurrence.norm_groups != recurrence.key_heads
    return recurrence.tiled or grouped


# -- GGUF -----------------------------------------------------------------------------------


def recurrent_from_gguf(
    family: Family, file: GGUFFile, number: Callable[..., Any], layers: int
) -> dict[str, Any]:
    """The same from a GGUF file; `number` gives the architecture's metadata. Which layers recur is
    seen from their tensors."""

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
    found: dict[str, Any] = {
        "mixers": tuple(mixer(layer) for layer in range(layers)), "recurrence": recurrence,
    }  # fmt: skip
    if family.name == "lfm2-moe":
        biases = (f"blk.{layer}.exp_probs_b.bias" in file.tensors for layer in range(layers))
        found["selection_bias"] = any(biases)
        found["experts_scale"] = number("expert_weights_scale", 1.0)
    if "shared_width" in family.keys:
        found["shared_width"] = number("expert_shared_feed_forward_length", 0)
    return found
