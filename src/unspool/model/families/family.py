"""`Family`: how a model family's files name the settings of `ModelConfig` and the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from unspool.errors import ModelFileError
from unspool.model.weights import Layout, TensorRule


def layer(file_name: str, *weights: str, layout: Layout = "plain") -> tuple[TensorRule, TensorRule]:
    """Rules for the weight and the bias of a module in a layer."""
    return (
        TensorRule(
            f"{file_name}.weight", tuple(f"layers.{{i}}.{o}.weight" for o in weights), layout
        ),
        TensorRule(f"{file_name}.bias", tuple(f"layers.{{i}}.{o}.bias" for o in weights), layout),
    )


def rules(*groups: tuple[TensorRule, ...]) -> tuple[TensorRule, ...]:
    return tuple(rule for group in groups for rule in group)


ENDS = (
    TensorRule("{p}embed_tokens.weight", ("embed.weight",)),
    TensorRule("{p}norm.weight", ("norm.weight",)),
    TensorRule("lm_head.weight", ("head.weight",)),
    TensorRule("language_model.lm_head.weight", ("head.weight",)),
    TensorRule("lm_head.bias", ("head.bias",)),
    TensorRule("lm_head.bias", ("head_bias",)),
)
IN_LAYER = "{p}layers.{i}."
ATTENTION = rules(
    layer(IN_LAYER + "self_attn.q_proj", "attention.q"),
    layer(IN_LAYER + "self_attn.k_proj", "attention.k"),
    layer(IN_LAYER + "self_attn.v_proj", "attention.v"),
    layer(IN_LAYER + "self_attn.o_proj", "attention.out"),
    layer(IN_LAYER + "self_attn.q_norm", "attention.q_norm"),
    layer(IN_LAYER + "self_attn.k_norm", "attention.k_norm"),
)
FEED = rules(
    layer(IN_LAYER + "mlp.gate_proj", "feed.gate"),
    layer(IN_LAYER + "mlp.up_proj", "feed.up"),
    layer(IN_LAYER + "mlp.down_proj", "feed.down"),
)
NORMS_BEFORE = rules(
    layer(IN_LAYER + "input_layernorm", "attention_norm"),
    layer(IN_LAYER + "post_attention_layernorm", "feed_norm"),
)
NORMS_AFTER = rules(
    layer(IN_LAYER + "post_attention_layernorm", "attention_post_norm"),
    layer(IN_LAYER + "post_feedforward_layernorm", "feed_post_norm"),
)
NORMS_AROUND = rules(
    layer(IN_LAYER + "input_layernorm", "attention_norm"),
    NORMS_AFTER,
    layer(IN_LAYER + "pre_feedforward_layernorm", "feed_norm"),
)


def experts(block: str, gate: str, up: str, down: str) -> tuple[TensorRule, ...]:
    """Rules for the router and the expert matrices of a mixture-of-experts block."""
    expert_prefix = "experts.{e}."
    names = {
        "gate": "router",
        expert_prefix + gate: "gate",
        expert_prefix + up: "up",
        expert_prefix + down: "down",
    }
    stacked, sides = f"{IN_LAYER}{block}.experts.", ("gate", "up")
    return (
        *(
            TensorRule(
                f"{IN_LAYER}{block}.{file_name}.weight", (f"layers.{{i}}.feed.{weight}.weight",)
            )
            for file_name, weight in names.items()
        ),
        # Some files stack the matrices of all experts in one tensor.
        TensorRule(f"{stacked}gate_up_proj", tuple(f"layers.{{i}}.feed.{o}.weight" for o in sides)),
        TensorRule(f"{stacked}down_proj", ("layers.{i}.feed.down.weight",)),
    )


LLAMA = rules(ENDS, ATTENTION, NORMS_BEFORE, FEED)


def gguf_rules(*, interleaved: bool, plus_one: bool, gated: bool = False) -> tuple[TensorRule, ...]:
    """llama.cpp's tensor names, the same for every family.

    Args:
        interleaved: Rows of queries and keys are permuted for the rotation of adjacent pairs.
        plus_one: Norm weights are stored with the one already added.
        gated: Rows of a head's gate follow those of its queries.
    """
    rope_layout: Layout = "interleaved" if interleaved else "plain"
    norm: Layout = "plus_one" if plus_one else "plain"
    return rules(
        (
            TensorRule("token_embd.weight", ("embed.weight",)),
            TensorRule("position_embd.weight", ("position_embed.weight",)),
            TensorRule("output_norm.weight", ("norm.weight",), norm),
            TensorRule("output_norm.bias", ("norm.bias",)),
            TensorRule("output.weight", ("head.weight",)),
            TensorRule("output.bias", ("head.bias",)),
            TensorRule("output.bias", ("head_bias",)),
        ),
        layer("blk.{i}.attn_norm", "attention_norm", layout=norm),
        layer("blk.{i}.attn_q", "attention.q", "attention.gate", layout="gated_heads")
        if gated
        else layer("blk.{i}.attn_q", "attention.q", layout=rope_layout),
        layer("blk.{i}.attn_k", "attention.k", layout=rope_layout),
        layer("blk.{i}.attn_v", "attention.v"),
        layer("blk.{i}.attn_qkv", "attention.q", "attention.k", "attention.v"),
        layer("blk.{i}.attn_q_norm", "attention.q_norm", layout=norm),
        layer("blk.{i}.attn_k_norm", "attention.k_norm", layout=norm),
        layer("blk.{i}.attn_output", "attention.out"),
        layer("blk.{i}.post_attention_norm", "attention_post_norm", layout=norm),
        layer("blk.{i}.ffn_norm", "feed_norm", layout=norm),
        layer("blk.{i}.ffn_gate", "feed.gate"),
        layer("blk.{i}.ffn_up", "feed.up"),
        layer("blk.{i}.ffn_up", "feed.gate", "feed.up"),  # Phi-3: both in one
        layer("blk.{i}.ffn_down", "feed.down"),
        layer("blk.{i}.post_ffw_norm", "feed_post_norm", layout=norm),
        layer("blk.{i}.ffn_gate_inp", "feed.router"),
        layer("blk.{i}.ffn_gate_exps", "feed.gate"),
        layer("blk.{i}.ffn_up_exps", "feed.up"),
        layer("blk.{i}.ffn_down_exps", "feed.down"),
        layer("blk.{i}.ffn_gate.{e}", "feed.gate"),  # files from before experts were stacked
        layer("blk.{i}.ffn_up.{e}", "feed.up"),
        layer("blk.{i}.ffn_down.{e}", "feed.down"),
        GGUF_RECURRENT,
    )


GGUF_RECURRENT = rules(
    layer("blk.{i}.shortconv.in_proj", "mixer.b", "mixer.c", "mixer.x"),
    layer("blk.{i}.shortconv.conv", "mixer.conv", layout="channels"),
    layer("blk.{i}.shortconv.out_proj", "mixer.out"),
    layer("blk.{i}.attn_qkv", "mixer.qkv"),
    layer("blk.{i}.attn_gate", "mixer.z"),
    layer("blk.{i}.ssm_beta", "mixer.b"),
    layer("blk.{i}.ssm_alpha", "mixer.a"),
    (
        TensorRule("blk.{i}.ssm_a", ("layers.{i}.mixer.a_log",), "log_of_minus"),
        TensorRule("blk.{i}.ssm_dt.bias", ("layers.{i}.mixer.dt_bias",)),
        TensorRule("blk.{i}.ssm_norm.weight", ("layers.{i}.mixer.norm_weight",)),
        TensorRule("blk.{i}.exp_probs_b.bias", ("layers.{i}.feed.selection_bias",)),
    ),
    layer("blk.{i}.ffn_gate_inp_shexp", "feed.shared_gate"),
    layer("blk.{i}.ffn_gate_shexp", "feed.shared.gate"),
    layer("blk.{i}.ffn_up_shexp", "feed.shared.up"),
    layer("blk.{i}.ffn_down_shexp", "feed.shared.down"),
)


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
