"""What a family of models is: how its files call our settings and our weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from unspool.model.tensor_names import LLAMA
from unspool.model.weights import Rule

Table = Mapping[str, Any]


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
    window_layers: Literal[
        "all",
        "none",
        "later",
        "every second",
        "three of four",
        "five of six",
        "unrotated",
        "but every nth",
    ] = "all"  # those with a window, where no list says it
    window_needs_switch: bool = False  # only with use_sliding_window
    mask_id: int | None = None  # the mask token where no file says it
    prefixes: tuple[str, ...] = ("model.", "language_model.model.", "model.language_model.", "")
    rules: tuple[Rule, ...] = ()
    gguf_rules: tuple[Rule, ...] = ()  # names in a GGUF file that only this family has


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
