"""A model on several devices: whole layers in order, or tensor parallel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unspool.errors import SettingsError
from unspool.model.config import LayerShape, ModelConfig, Recurrence
from unspool.model.files.stored import FileTensor
from unspool.model.weights import weight_shapes

# -- Assign layers to several devices in order (pipeline without overlap)
#
# The embedding is on the first device, the last norm and the head on the last one (on the first if
# the head is tied). A step goes from device to device, so only one computes at a time; with tensor
# parallelism (`split.py`) all devices compute in parallel.
#
#     places = places_of(config, ["cuda:0", "cuda:1"])
#     places.layers                                    # ("cuda:0", "cuda:0", ..., "cuda:1")
#     places.of("layers.7.attention.q.weight")         # "cuda:1"

_AT_THE_END = ("transform.", "norm.", "head.", "head_bias")


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """The device of each layer, of the embedding and of the head."""

    layers: tuple[str, ...]
    embedding_device: str
    head_device: str

    def device_of(self, name: str) -> str:
        """The device of a weight."""
        if name.startswith("layers."):
            return self.layers[int(name.split(".")[1])]
        return self.head_device if name.startswith(_AT_THE_END) else self.embedding_device


def build_device_map(
    config: ModelConfig, devices: Sequence[str], room: Sequence[float] | None = None
) -> DeviceMap:
    """Distribute the layers so that each device has the same share of the weights, or a share in
    proportion to its `room`."""
    groups = _together(config)
    if len(groups) < len(devices):
        raise SettingsError(
            f"{len(devices)} devices are too many: the layers of this model can be divided over at "
            f"most {len(groups)}"
        )
    sizes = _group_sizes(config, groups)
    filled = config.vocab_size * config.width  # the embedding
    total = filled + sum(sizes)
    cumulative_room = list(accumulate(room or [1.0] * len(devices)))
    layers: list[str] = []
    device = num_groups_here = 0
    for index, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        is_full = filled + size / 2 > total * cumulative_room[device] / cumulative_room[-1]
        must_advance = (
            len(groups) - index < len(devices) - device
        )  # each of the others gets one at least
        if num_groups_here and (is_full or must_advance) and device < len(devices) - 1:
            device, num_groups_here = device + 1, 0
        layers += [devices[device]] * len(group)
        filled, num_groups_here = filled + size, num_groups_here + 1
    return DeviceMap(tuple(layers), devices[0], devices[0] if config.tied else devices[-1])


def _together(config: ModelConfig) -> list[list[int]]:
    """Groups of layers that must be on one device, because they share keys and values."""
    borrowing_layers = range(config.layers - config.kv_shared, config.layers)
    start = min((config.kv_source(layer) for layer in borrowing_layers), default=config.layers)
    independent = [[layer] for layer in range(start)]
    return [*independent, list(range(start, config.layers))] if borrowing_layers else independent


def _group_sizes(config: ModelConfig, groups: list[list[int]]) -> list[int]:
    """Number of weights of each group; the head counts for the last one."""
    layer_sizes = [0] * config.layers
    for name, shape in weight_shapes(config).items():
        if name.startswith("layers."):
            layer_sizes[int(name.split(".")[1])] += math.prod(shape)
        elif name.startswith("head."):
            layer_sizes[-1] += math.prod(shape)
    return [sum(layer_sizes[layer] for layer in group) for group in groups]


Ints = npt.NDArray[np.int64]

_VOCABULARY = (
    "embed.weight", "token_inputs.embed.weight", "head.weight", "head.bias", "head_bias",
)  # fmt: skip
_MOST_RANKS = 64  # rank counts up to this are suggested if the requested one does not fit


class WeightShard(NamedTuple):
    """The indices along one axis of a weight that a rank has."""

    axis: int
    indices: Ints


@dataclass(frozen=True, slots=True)
class TensorParallelRank:
    """A rank of a tensor-parallel group."""

    rank: int
    ranks: int

    @property
    def all_ranks(self) -> list[TensorParallelRank]:
        """All ranks of the group."""
        return [TensorParallelRank(rank, self.ranks) for rank in range(self.ranks)]

    def local_range(self, count: int) -> Ints:
        """This rank's range of `count` items; ranges differ by one if it does not divide evenly."""
        start, end = (count * n // self.ranks for n in (self.rank, self.rank + 1))
        return np.arange(start, end)

    def local_kv_heads(self, count: int) -> Ints:
        """This rank's KV heads; several ranks may share one."""
        if count >= self.ranks:
            return self.local_range(count)
        return np.array([self.rank * count // self.ranks])

    def local_part(self, config: ModelConfig, name: str, tensor: FileTensor) -> FileTensor:
        """This rank's part of a weight. Biases of summed outputs are zero except on rank 0."""
        if is_added_once(name):
            return (
                tensor
                if self.rank == 0
                else FileTensor.from_float32(np.zeros(tensor.shape, np.float32))
            )
        cut = shard_of(config, name, self)
        return tensor if cut is None else tensor.part(*cut)


def is_added_once(name: str) -> bool:
    """Whether this is the bias of a matrix whose output is summed over the ranks."""
    return name.endswith((".attention.out.bias", ".down.bias"))


def shard_of(config: ModelConfig, name: str, share: TensorParallelRank) -> WeightShard | None:
    """The part of a weight that a rank has; None: all of it."""
    if name in _VOCABULARY:
        return WeightShard(0, share.local_range(config.vocab_size))
    if not name.startswith("layers."):
        return None
    _, number, part, *inner = name.split(".")
    layer = int(number)
    if part == "attention":
        return _attention_cut(config, layer, inner, share)
    if part == "feed":
        return _feed_cut(config, layer, inner, share)
    if part == "mixer" and config.mixer(layer) == "delta":
        assert config.recurrence is not None
        return _delta_cut(config.recurrence, inner, share)
    return None


def _attention_cut(
    config: ModelConfig, layer: int, inner: list[str], share: TensorParallelRank
) -> WeightShard | None:
    shape = config.shape(layer)
    heads, key_heads = share.local_range(shape.heads), share.local_kv_heads(shape.kv_heads)
    match inner:
        case ["sinks"]:
            return WeightShard(0, heads)
        case ["q" | "gate", _]:
            return WeightShard(0, _of_heads(heads, shape.head_width))
        case ["k" | "v", _]:
            return WeightShard(0, _of_heads(key_heads, shape.head_width))
        case ["out", "weight"]:
            return WeightShard(1, _of_heads(heads, shape.head_width))
        case ["q_norm", _] if config.qk_norm == "whole":
            return WeightShard(0, _of_heads(heads, shape.head_width))
        case ["k_norm", _] if config.qk_norm == "whole":
            return WeightShard(0, _of_heads(key_heads, shape.head_width))
    return None


def _feed_cut(
    config: ModelConfig, layer: int, inner: list[str], share: TensorParallelRank
) -> WeightShard | None:
    *owner, side, kind = ["", *inner]
    if side not in ("gate", "up", "down"):
        return None
    if owner[-1] == "shared":
        stacked, width = 0, config.shared_width
    elif owner[-1] == "experts" or (config.has_experts(layer) and owner[-1] != "dense"):
        stacked, width = 1, config.expert_width  # after the axis of the experts
    else:
        stacked, width = 0, config.shape(layer).ff_width
    if side == "down":
        return WeightShard(stacked + 1, share.local_range(width)) if kind == "weight" else None
    return WeightShard(stacked, share.local_range(width))


def _delta_cut(
    recurrence: Recurrence, inner: list[str], share: TensorParallelRank
) -> WeightShard | None:
    """Gated DeltaNet: key heads in order, with their value heads."""
    keys = _of_heads(share.local_range(recurrence.key_heads), recurrence.key_width)
    heads = local_value_heads(recurrence, share)
    values = _of_heads(heads, recurrence.value_width)
    match inner:
        case ["qkv", _]:
            return WeightShard(0, _channels(recurrence, keys, values))
        case ["conv", _]:
            return WeightShard(1, _channels(recurrence, keys, values))
        case ["z", _]:
            return WeightShard(0, values)
        case ["a" | "b", _] | ["a_log" | "dt_bias"]:
            return WeightShard(0, heads)
        case ["out", _]:
            return WeightShard(1, values)
    return None


def local_value_heads(recurrence: Recurrence, share: TensorParallelRank) -> Ints:
    """The value heads that use a rank's key heads."""
    local_keys = set(share.local_range(recurrence.key_heads).tolist())
    heads = [h for h in range(recurrence.value_heads) if recurrence.key_head(h) in local_keys]
    return np.array(heads, np.int64)


def _channels(recurrence: Recurrence, keys: Ints, values: Ints) -> Ints:
    """Indices of queries, keys and values, concatenated."""
    return np.concatenate((keys, recurrence.key_dim + keys, 2 * recurrence.key_dim + values))


def _of_heads(heads: Ints, width: int) -> Ints:
    """The rows of some heads."""
    return (heads[:, None] * width + np.arange(width)).reshape(-1)


def shard_config(config: ModelConfig, share: TensorParallelRank) -> ModelConfig:
    """The config of a rank's transformer: its heads, inner widths and part of the vocabulary."""
    ranks = share.ranks
    shapes = [_part_shape(config.shape(layer), ranks) for layer in range(config.layers)]
    recurrence = config.recurrence
    if recurrence is not None and "delta" in config.mixers:
        recurrence = dataclasses.replace(
            recurrence,
            key_heads=recurrence.key_heads // ranks,
            value_heads=recurrence.value_heads // ranks,
        )
    return dataclasses.replace(
        config,
        vocab_size=len(share.local_range(config.vocab_size)),
        heads=max(shape.heads for shape in shapes),
        kv_heads=max(shape.kv_heads for shape in shapes),
        ff_width=max(shape.ff_width for shape in shapes),
        shapes=tuple(shapes) if config.shapes else (),
        expert_width=config.expert_width // ranks,
        shared_width=config.shared_width // ranks,
        recurrence=recurrence,
        attention_scale=config.scale,
        mask_id=None,  # may be a token of another rank
    )


def _part_shape(shape: LayerShape, ranks: int) -> LayerShape:
    return dataclasses.replace(
        shape,
        heads=shape.heads // ranks,
        kv_heads=max(1, shape.kv_heads // ranks),
        ff_width=max(1, shape.ff_width // ranks),  # unused in layers with only experts
    )


def _is_dense(config: ModelConfig, layer: int) -> bool:
    return not config.has_experts(layer) or config.has_dense_and_experts(layer)


def check_shardable(config: ModelConfig, ranks: int) -> None:
    """Raise if the model cannot be divided evenly over this number of ranks."""
    reason = reason_not_splittable(config, ranks)
    if reason is None:
        return
    alternatives = [
        str(n) for n in range(2, _MOST_RANKS + 1) if reason_not_splittable(config, n) is None
    ]
    advice = f"{', '.join(alternatives)} would" if alternatives else "it fits no number of them"
    raise SettingsError(
        f"the model cannot be split over {ranks} processes, because {reason}; {advice}"
        + (" fit" if alternatives else "; put its layers onto several devices instead (devices)")
    )


def reason_not_splittable(config: ModelConfig, ranks: int) -> str | None:
    """Why a model cannot be divided evenly over the ranks; None: it can."""
    for layer in range(config.layers):
        shape = config.shape(layer)
        if config.mixer(layer) == "attention":
            if shape.heads % ranks:
                return f"it has {shape.heads} heads"
            if shape.kv_heads % ranks and ranks % shape.kv_heads:
                return f"it has {shape.kv_heads} heads of keys and values"
        if _is_dense(config, layer) and shape.ff_width % ranks:
            return f"its feed-forward has an inner width of {shape.ff_width}"
    if config.experts and config.expert_width % ranks:
        return f"its experts have an inner width of {config.expert_width}"
    if config.shared_width % ranks:
        return f"its shared expert has an inner width of {config.shared_width}"
    recurrence = config.recurrence
    if recurrence is not None and "delta" in config.mixers and recurrence.key_heads % ranks:
        return f"its recurrent layers have {recurrence.key_heads} key heads"
    return None
