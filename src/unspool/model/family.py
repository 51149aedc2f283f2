"""`Family`: how a model family's files name the settings of `ModelConfig` and the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from unspool.errors import ModelFileError
from unspool.model.tensor_names import LLAMA
from unspool.model.weights import TensorRule

Table = Mapping[str, Any]


# Settings that every family has, whether or not its config class in transformers declares them.
COMMON_REQUIRED: Table = {
    "per_layer_config": None,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
}
COMMON_READS = ("eos_token_id", "is_causal", "unspool")
ROTARY_READS = (
    "rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family's Hugging Face checkpoints are read and written.

    "Key" means a key of config.json, "setting" a field of `ModelConfig`.
    """

    name: str
    model_type: str  # model_type in config.json
    architecture: str  # class name in transformers
    gguf: str  # general.architecture in a GGUF file; "": GGUF is not supported
    keys: Table  # setting -> key
    defaults: Table  # key -> value if config.json lacks it
    only: Table = field(default_factory=dict)  # key -> the only supported value
    fixed: Table = field(default_factory=dict)  # setting -> its value in this family
    reads: tuple[str, ...] = ()  # further keys that code reads
    other_names: Table = field(default_factory=dict)  # alternative key -> key; it takes precedence
    rotary_reads: tuple[str, ...] = ROTARY_READS
    rotary_by_kind: bool = False  # separate RoPE settings for layers with and without a window
    window_layers: Literal[
        "",  # no sliding window: sliding_window is not a setting of this family
        "all",
        "listed",
        "later",
        "every second",
        "three of four",
        "five of six",
        "unrotated",
        "but every nth",
    ] = ""  # layers with a window if layer_types is absent ("all": layer_types is not read)
    window_needs_switch: bool = False  # only with use_sliding_window
    mask_id: int | None = None  # the mask token if no file names it
    prefixes: tuple[str, ...] = ("model.", "language_model.model.", "model.language_model.", "")
    rules: tuple[TensorRule, ...] = ()
    gguf_rules: tuple[TensorRule, ...] = ()  # tensors of GGUF files that only this family has

    @property
    def required(self) -> Table:
        """Key -> the only supported value."""
        common = {key: v for key, v in COMMON_REQUIRED.items() if key not in self.reads}
        return {**common, **self.only}

    @property
    def settings(self) -> frozenset[str]:
        """The keys of config.json that affect the computation; transformers ignores all others,
        and so do we."""
        windows: tuple[str, ...] = ("sliding_window",) if self.window_layers else ()
        if self.window_layers not in ("", "all"):
            windows += ("layer_types",)
        if self.window_needs_switch:
            windows += ("use_sliding_window",)
        rotary = self.rotary_reads if self.fixed.get("positions", "rotary") == "rotary" else ()
        named = (*self.keys.values(), *self.required, *self.reads, *self.other_names)
        return frozenset((*named, *COMMON_READS, *windows, *rotary))


def check_length(key: str, listed: Sequence[Any], layers: int) -> None:
    """Raise if a list of config.json does not have one entry per layer."""
    if len(listed) != layers:
        raise ModelFileError(
            f"config.json: {key} must have an entry for each of the {layers} layers, "
            f"got {len(listed)}"
        )


_LLAMA_KEYS = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "ff_width": "intermediate_size",
    "context": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tied": "tie_word_embeddings",
}
_LLAMA_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
}
BIASES = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}


def llama_like(
    name: str,
    architecture: str,
    *,
    keys: Table | None = None,
    defaults: Table | None = None,
    **options: Any,
) -> Family:
    """Build a family from its differences to Llama."""
    llama_options = {"model_type": name, "gguf": name, "rules": LLAMA}
    return Family(
        name=name,
        architecture=architecture,
        keys={**_LLAMA_KEYS, **(keys or {})},
        defaults={**_LLAMA_DEFAULTS, **(defaults or {})},
        **{**llama_options, **options},
    )  # fmt: skip
