"""Assign layers to several devices in order (pipeline without overlap).

The embedding is on the first device, the last norm and the head on the last one (on the first if
the head is tied). A step goes from device to device, so only one computes at a time; with tensor
parallelism (`split.py`) all devices compute in parallel.

    places = places_of(config, ["cuda:0", "cuda:1"])
    places.layers                                    # ("cuda:0", "cuda:0", ..., "cuda:1")
    places.of("layers.7.attention.q.weight")         # "cuda:1"
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from unspool.errors import SettingsError
from unspool.model.config import ModelConfig
from unspool.model.weights import weight_shapes

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
