"""Settings of single families that the tables cannot express: config.json, GGUF, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from unspool.errors import ModelFileError
from unspool.model.config import LayerShape, ModelConfig, Recurrence
from unspool.model.families.family import Family, check_length
from unspool.model.files.gguf import GGUFFile

# -- Settings of single families that the tables cannot express, from config.json and back

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


# -- Settings of Mamba-2 models, from config.json or GGUF metadata, and back to config.json

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


# -- Settings of recurrent layers, from config.json or GGUF metadata, and back to config.json

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
