"""What a GGUF file says of recurrent layers and of experts, in the words of llama.cpp's converter.

llama.cpp finds the layers that recur by rule: those of LFM2 are the ones without key heads, of
Qwen's every n-th has attention. A model of another pattern is refused, because its file would be
read as another model.
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
    """Refuse what a file has no words for."""
    if config.family in DELTAS and not _interval(config):
        raise ModelFileError(
            "llama.cpp takes it that every n-th layer of such a model has attention and all others "
            f"recur; here they are {', '.join(config.mixers)}"
        )
    recurrence = config.recurrence
    if recurrence is not None and recurrence.key_width != recurrence.value_width:
        raise ModelFileError(
            "llama.cpp takes it that keys and values of a recurrent head are equally wide; here "
            f"they are {recurrence.key_width} and {recurrence.value_width} numbers wide"
        )
    if config.experts and config.family in (*CONVOLUTIONS, *DELTAS):
        first = tuple(range(len(config.dense_layers) if config.family in CONVOLUTIONS else 0))
        if config.dense_layers != first or not config.normalize_experts:
            raise ModelFileError(
                f"llama.cpp takes it that a {config.family} model has experts in all layers (LFM2: "
                "but the first ones), whose weights sum to one; this one is different"
            )


def _interval(config: ModelConfig) -> int:
    """Every which layer has attention; 0: there is no such number."""
    for every in range(1, config.layers + 1):
        kinds = ("delta" if (layer + 1) % every else "attention" for layer in range(config.layers))
        if tuple(kinds) == config.mixers:
            return every
    # A model shorter than one round recurs in all layers.
    return 0 if "attention" in config.mixers else config.layers + 1


def describe_recurrent(writer: GGUFWriter, config: ModelConfig) -> None:
    """The settings of recurrent layers and of experts; none for other families."""
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
        writer.add_ssm_inner_size(recurrence.values)
        writer.add_full_attention_interval(_interval(config))
        if config.family != "qwen3-next" and config.rotary is not None:
            # Pairs are turned by time, height and width of a picture, one after the other; of text
            # all three are the position.
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


def key_heads_of_layers(config: ModelConfig) -> int | list[int]:
    """LFM2's recurrent layers are told by having no key heads."""
    if config.family not in CONVOLUTIONS:
        return config.kv_heads
    return [
        config.kv_heads if config.mixer(layer) == "attention" else 0
        for layer in range(config.layers)
    ]


# -- the order of heads ---------------------------------------------------------------------


def in_file_order(config: ModelConfig, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The weights with Qwen3.5's value heads as GGUF files have them: those that share a key head
    lie `key_heads` apart, and not beside each other."""
    recurrence = config.recurrence
    if recurrence is None or config.family not in ("qwen3.5", "qwen3.5-moe") or recurrence.tiled:
        return weights
    return {name: _reordered(name, weight, recurrence) for name, weight in weights.items()}


def _reordered(name: str, weight: Tensor, recurrence: Recurrence) -> Tensor:
    import torch

    _, _, part = name.partition(".mixer.")
    heads = torch.arange(recurrence.value_heads).view(recurrence.key_heads, -1).t().reshape(-1)
    numbers = torch.arange(recurrence.values).view(recurrence.value_heads, -1)[heads].reshape(-1)
    behind = torch.cat((torch.arange(2 * recurrence.keys), 2 * recurrence.keys + numbers))
    if part in ("b.weight", "a.weight", "a_log", "dt_bias"):
        return weight[heads]
    if part == "z.weight":
        return weight[numbers]
    if part == "out.weight":
        return weight[:, numbers]
    if part == "qkv.weight":
        return weight[behind]
    return weight[:, behind] if part == "conv.weight" else weight
