"""What a family of models is: how its files call our settings and our weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from unspool.errors import ModelFileError
from unspool.model.tensor_names import LLAMA
from unspool.model.weights import Rule

Table = Mapping[str, Any]


# Settings that every family has, whether its own class in transformers names them or not.
COMMON_ONLY: Table = {
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
    """How one family's Hugging Face checkpoints are read and written."""

    name: str
    model_type: str  # what config.json says
    architecture: str  # the class that transformers builds from it
    gguf: str  # general.architecture in a GGUF file; "": there are none that we read
    keys: Table  # our setting -> their key
    defaults: Table  # their key -> value where config.json is silent
    only: Table = field(default_factory=dict)  # their key -> what it must be, if it is there
    fixed: Table = field(default_factory=dict)  # our setting -> what it always is here
    reads: tuple[str, ...] = ()  # further keys of config.json that code reads
    other_names: Table = field(default_factory=dict)  # another name -> their key; it wins
    rotary_reads: tuple[str, ...] = ROTARY_READS
    rotary_by_kind: bool = False  # layers with and without a window have rotary settings each
    window_layers: Literal[
        "",  # no layer ever has a window: sliding_window is not a setting of this family
        "all",
        "listed",
        "later",
        "every second",
        "three of four",
        "five of six",
        "unrotated",
        "but every nth",
    ] = ""  # layers with a window, where no layer_types says it ("all": none is read)
    window_needs_switch: bool = False  # only with use_sliding_window
    mask_id: int | None = None  # the mask token where no file says it
    prefixes: tuple[str, ...] = ("model.", "language_model.model.", "model.language_model.", "")
    rules: tuple[Rule, ...] = ()
    gguf_rules: tuple[Rule, ...] = ()  # names in a GGUF file that only this family has

    @property
    def required(self) -> Table:
        """Their key -> the only value of it that is supported."""
        common = {key: v for key, v in COMMON_ONLY.items() if key not in self.reads}
        return {**common, **self.only}

    @property
    def settings(self) -> frozenset[str]:
        """The keys of config.json that decide what such a model computes; all others are not
        read, as transformers does not read them."""
        windows: tuple[str, ...] = ("sliding_window",) if self.window_layers else ()
        if self.window_layers not in ("", "all"):
            windows += ("layer_types",)
        if self.window_needs_switch:
            windows += ("use_sliding_window",)
        rotary = self.rotary_reads if self.fixed.get("positions", "rotary") == "rotary" else ()
        named = (*self.keys.values(), *self.required, *self.reads, *self.other_names)
        return frozenset((*named, *COMMON_READS, *windows, *rotary))


def check_length(key: str, listed: Sequence[Any], layers: int) -> None:
    """Refuse a list of config.json that should have an entry for each layer and does not."""
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


def like_llama(
    name: str,
    architecture: str,
    *,
    keys: Table | None = None,
    defaults: Table | None = None,
    **more: Any,
) -> Family:
    """A family by what it has beyond Llama's, or instead of it."""
    usual = {"model_type": name, "gguf": name, "rules": LLAMA}
    return Family(
        name=name,
        architecture=architecture,
        keys={**_LLAMA_KEYS, **(keys or {})},
        defaults={**_LLAMA_DEFAULTS, **(defaults or {})},
        **{**usual, **more},
    )  # fmt: skip
