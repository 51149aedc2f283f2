"""GGUF metadata of recurrent layers and of experts, as llama.cpp's converter writes it.

llama.cpp derives which layers are recurrent: in LFM2 those without KV heads, in Qwen all but every
n-th. A model with another pattern is refused, because its file would be read as another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from unspool.errors import ModelFileError
from unspool.model.config import ModelConfig
from unspool.model.recurrence import Recurrence
from unspool.model.recurrent_config import CONVOLUTIONS, DELTAS

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from torch import Tensor


def check_recurrent(config: ModelConfig) -> None:
    """Raise if llama.cpp's format cannot express the model."""
    if config.family in DELTAS and not _interval(config):
        raise ModelFileError(
            "llama.cpp needs attention in every n-th layer of such a model and recurrence in all "
            f"others; the layers are {', '.join(config.mixers)}"
        )
    recurrence = config.recurrence
    if recurrence is not None and recurrence.key_width != recurrence.value_width:
        raise ModelFileError(
            "llama.cpp needs keys and values of a recurrent head of equal width, got "
            f"{recurrence.key_width} and {recurrence.value_width}"
        )
    if config.experts and config.family in (*CONVOLUTIONS, *DELTAS):
        leading_layers = tuple(
            range(len(config.dense_layers) if config.family in CONVOLUTIONS else 0)
        )
        if config.dense_layers != leading_layers or not config.normalize_experts:
            raise ModelFileError(
                f"llama.cpp needs experts in all layers of a {config.family} model (LFM2: except "
                "the first ones) with weights that sum to one; this model differs"
            )


def _interval(config: ModelConfig) -> int:
    """The n of "every n-th layer has attention"; 0: there is none."""
    for interval in range(1, config.layers + 1):
        kinds = (
            "delta" if (layer + 1) % interval else "attention" for layer in range(config.layers)
        )
        if tuple(kinds) == config.mixers:
            return interval
    # A model with fewer than n layers is recurrent in all of them.
    return 0 if "attention" in config.mixers else config.layers + 1


def write_recurrent_settings(writer: GGUFWriter, config: ModelConfig) -> None:
    """Write the settings of recurrent layers and of experts; nothing for other families."""
    recurrence = config.recurrence
    if recurrence is None:
        return
    if config.family in CONVOLUTIONS:
        writer.add_shortconv_l_cache(recurrence.conv_kernel)
    else:
        writer.add_ssm_conv_kernel(recurrence.conv_kernel)
        writer.add_ssm_state_size(recurrence.key_width)
        writer.add_ssm_group_count(recurrence.key_heads)
        writer.add_ssm_time_step_rank(recurrence.value_heads)
        writer.add_ssm_inner_size(recurrence.value_dim)
        writer.add_full_attention_interval(_interval(config))
        if config.family != "qwen3-next" and config.rotary is not None:
            # M-RoPE: sections of pairs for time, height and width; for text all three are the
            # position.
            pairs = config.rotary.width // 2
            writer.add_rope_dimension_sections([-(-(pairs - n) // 3) for n in range(3)] + [0])
    if config.experts:
        _describe_experts(writer, config)


def _describe_experts(writer: GGUFWriter, config: ModelConfig) -> None:
    from gguf import ExpertGatingFuncType

    writer.add_expert_count(config.experts)
    writer.add_expert_used_count(config.experts_per_token)
    writer.add_expert_feed_forward_length(config.expert_width)
    if config.shared_width:
        writer.add_expert_shared_feed_forward_length(config.shared_width)
    if config.family in CONVOLUTIONS:
        writer.add_leading_dense_block_count(len(config.dense_layers))
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        if config.experts_scale != 1:
            writer.add_expert_weights_scale(config.experts_scale)


def kv_heads_per_layer(config: ModelConfig) -> int | list[int]:
    """The number of KV heads; per layer in LFM2, where 0 marks recurrent layers."""
    if config.family not in CONVOLUTIONS:
        return config.kv_heads
    return [
        config.kv_heads if config.mixer(layer) == "attention" else 0
        for layer in range(config.layers)
    ]


# -- the order of heads ---------------------------------------------------------------------


def permute_for_gguf(config: ModelConfig, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Permute Qwen3.5's value heads to the order of GGUF files: those that share a key head are
    `key_heads` apart instead of adjacent."""
    recurrence = config.recurrence
    if recurrence is None or config.family not in ("qwen3.5", "qwen3.5-moe") or recurrence.tiled:
        return weights
    return {name: _reordered(name, weight, recurrence) for name, weight in weights.items()}


def _reordered(name: str, weight: Tensor, recurrence: Recurrence) -> Tensor:
    import torch

    _, _, part = name.partition(".mixer.")
    heads = torch.arange(recurrence.value_heads).view(recurrence.key_heads, -1).t().reshape(-1)
    value_rows = (
        torch.arange(recurrence.value_dim).view(recurrence.value_heads, -1)[heads].reshape(-1)
    )
    channels = torch.cat(
        (torch.arange(2 * recurrence.key_dim), 2 * recurrence.key_dim + value_rows)
    )
    if part in ("b.weight", "a.weight", "a_log", "dt_bias"):
        return weight[heads]
    if part == "z.weight":
        return weight[value_rows]
    if part == "out.weight":
        return weight[:, value_rows]
    if part == "qkv.weight":
        return weight[channels]
    return weight[:, channels] if part == "conv.weight" else weight
