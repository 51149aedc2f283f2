"""The names and shapes of a model's weights, and the rules that map a file's tensors to them.

`shapes(config)` lists the weights in the order of the computation. A `TensorRule` says which tensor
of a file holds one or several of them, and in what layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from unspool.model.config import ModelConfig

Shape = tuple[int, ...]
Layout = Literal[
    "plain", "transposed", "per_head", "interleaved", "plus_one", "gated_heads", "grouped",
    "grouped_values", "channels", "log_of_minus", "flat", "pairs", "pairs_transposed",
]  # fmt: skip


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The shape of every weight, by name."""
    width = config.width
    result: dict[str, Shape] = {"embed.weight": (config.vocab_size, width)}
    if config.positions == "learned":
        result["position_embed.weight"] = (config.context, width)

    def norm(name: str) -> None:
        result[f"{name}.weight"] = (width,)
        if config.norm == "layer" and config.norm_bias:
            result[f"{name}.bias"] = (width,)

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        result[f"{name}.weight"] = (rows, columns)
        if bias:
            result[f"{name}.bias"] = (rows,)

    if config.embedding_norm:
        norm("embed_norm")
    if config.token_width:
        total_width = config.layers * config.token_width
        linear("token_inputs.embed", config.vocab_size, total_width, False)
        linear("token_inputs.project", total_width, width, False)
        result["token_inputs.norm.weight"] = (config.token_width,)
    sides = ("gate", "up") if config.gated else ("up",)
    for layer in range(config.layers):
        prefix = f"layers.{layer}"
        if config.has_attention_norm(layer):
            norm(f"{prefix}.attention_norm")
        shape = config.shape(layer)
        if config.mixer(layer) == "attention":
            result.update(_attention_shapes(config, layer))
        elif config.mixer(layer) != "none":
            result.update(_mixer_shapes(config, layer))
        if config.norm_after or config.norm_sums:
            norm(f"{prefix}.attention_post_norm")
        if config.has_feed_norm(layer):
            norm(f"{prefix}.feed_norm")
        experts = dense = f"{prefix}.feed"
        if config.has_dense_and_experts(layer):
            dense, experts = f"{prefix}.feed.dense", f"{prefix}.feed.experts"
            for side in ("dense_norm", "dense_post_norm", "experts_norm", "experts_post_norm"):
                norm(f"{prefix}.feed.{side}")
            norm(f"{prefix}.feed.router_norm")
            result[f"{prefix}.feed.expert_scale"] = (config.experts,)
        if config.has_experts(layer):
            count, inner = config.experts, config.expert_width
            linear(f"{experts}.router", count, width, config.router_bias)
            if config.selection_bias:
                result[f"{experts}.selection_bias"] = (count,)
            if config.shared_width and config.shared_gated:
                linear(f"{experts}.shared_gate", 1, width, False)
            if config.shared_width:
                for side in sides:
                    linear(f"{experts}.shared.{side}", config.shared_width, width, False)
                linear(f"{experts}.shared.down", width, config.shared_width, False)
            for name, rows, columns in (
                *((side, inner, width) for side in sides), ("down", width, inner),
            ):  # fmt: skip
                result[f"{experts}.{name}.weight"] = (count, rows, columns)
                if config.expert_bias:
                    result[f"{experts}.{name}.bias"] = (count, rows)
        if config.has_feed(layer) and (
            not config.has_experts(layer) or config.has_dense_and_experts(layer)
        ):
            for side in sides:
                linear(f"{dense}.{side}", shape.ff_width, width, config.ff_bias)
            linear(f"{dense}.down", width, shape.ff_width, config.ff_bias)
        if config.norm_after or config.norm_sums:
            norm(f"{prefix}.feed_post_norm")
        if config.token_width:
            linear(f"{prefix}.token_input.gate", config.token_width, width, False)
            linear(f"{prefix}.token_input.out", width, config.token_width, False)
            norm(f"{prefix}.token_input.norm")
        if config.layer_scale:
            result[f"{prefix}.scale"] = (1,)
    if config.head_transform:
        if config.norm_before:
            norm("transform.norm")
        linear("transform.dense", width, width, config.head_transform_bias)
    norm("norm")
    if not config.tied:
        linear("head", config.vocab_size, width, config.head_bias)
    elif config.head_bias:
        result["head_bias"] = (config.vocab_size,)
    return result


def _attention_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    shape, has_own_kv = config.shape(layer), config.kv_source(layer) == layer
    rows = {"q": shape.out_width}
    if config.attention_gate:
        rows["gate"] = shape.out_width
    if has_own_kv:
        rows["k"] = shape.kv_width
    if has_own_kv and config.has_values(layer):
        rows["v"] = shape.kv_width
    result: dict[str, Shape] = {}
    for name, count in rows.items():
        result[f"{name}.weight"] = (count, config.width)
        if config.qkv_bias:
            result[f"{name}.bias"] = (count,)
    if config.qk_norm != "none":
        is_whole, head = config.qk_norm == "whole", shape.head_width
        result["q_norm.weight"] = (shape.out_width if is_whole else head,)
        if has_own_kv:
            result["k_norm.weight"] = (shape.kv_width if is_whole else head,)
    if config.sinks:
        result["sinks"] = (shape.heads,)
    result["out.weight"] = (config.width, shape.out_width)
    if config.out_bias:
        result["out.bias"] = (config.width,)
    return {f"layers.{layer}.attention.{name}": size for name, size in result.items()}


def _mixer_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    """Shapes of a recurrent layer; the convolution's weight is [kernel, channels]."""
    recurrence, width, mixer = config.recurrence, config.width, config.mixer(layer)
    assert recurrence is not None
    channels = recurrence.channels(mixer, width)
    heads, values = recurrence.value_heads, recurrence.value_dim
    if mixer == "conv":
        result: dict[str, Shape] = {f"{name}.weight": (width, width) for name in "bcx"}
        values = width
    else:
        rows = {"qkv": channels, "z": values, "b": heads, "a": heads}
        if mixer == "mamba2":
            rows = {"z": values, "vkq": channels, "dt": heads}
        result = {f"{name}.weight": (count, width) for name, count in rows.items()}
        result |= {"a_log": (heads,), "dt_bias": (heads,)}
        result |= {"d": (heads,)} if mixer == "mamba2" else {}
        result["norm_weight"] = (values if mixer == "mamba2" else recurrence.value_width,)
    result["conv.weight"] = (recurrence.conv_kernel, channels)
    if recurrence.conv_bias:
        result["conv.bias"] = (channels,)
    result["out.weight"] = (width, values)
    return {f"layers.{layer}.mixer.{name}": size for name, size in result.items()}


def parameter_count(config: ModelConfig) -> int:
    return sum(map(math.prod, weight_shapes(config).values()))


@dataclass(frozen=True, slots=True)
class TensorRule:
    """A tensor of a file (or one tensor per expert) and the weights that it holds.

    Names may contain {i} (the layer) and {e} (the expert). Several weights in one tensor are
    concatenated along the rows; in the layout "pairs" the rows of two weights alternate, in each
    expert's matrix or bias.
    """

    tensor: str
    weights: tuple[str, ...]
    layout: Layout = "plain"
    added_tensor: str = ""  # another tensor, whose first row is added to every row
    reserved: int = 0  # leading rows that no token uses

    @property
    def for_experts(self) -> bool:
        signs = ("{e}", "_exps.weight", "_exps.bias", ".experts.", "_moe.input_", "_moe.output_")
        return any(sign in self.tensor for sign in signs)
