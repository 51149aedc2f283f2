"""A model whose layers lie on several devices, in order: the simpler way to run a large one.

The table of tokens is on the first device, the last norm and the head on the last one (on the
first, where the head is the same table). A step goes from device to device, so only one of them
works at a time; a model that is split (`split.py`) has all of them work at once.

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
from unspool.model.weights import shapes

_AT_THE_END = ("transform.", "norm.", "head.", "head_bias")


@dataclass(frozen=True, slots=True)
class Places:
    """Which device has which layer, and what lies before and behind the layers."""

    layers: tuple[str, ...]
    first: str
    last: str

    def of(self, name: str) -> str:
        """Where a weight lies."""
        if name.startswith("layers."):
            return self.layers[int(name.split(".")[1])]
        return self.last if name.startswith(_AT_THE_END) else self.first


def places_of(
    config: ModelConfig, devices: Sequence[str], room: Sequence[float] | None = None
) -> Places:
    """The layers over these devices, so that each has its share of the weights: all the same, or
    as much as each has `room`."""
    groups = _together(config)
    if len(groups) < len(devices):
        raise SettingsError(
            f"{len(devices)} devices are too many for this model, whose layers can be parted into "
            f"{len(groups)}; give fewer"
        )
    sizes = _group_sizes(config, groups)
    filled = config.vocab_size * config.width  # by the table of tokens
    total = filled + sum(sizes)
    shares = list(accumulate(room or [1.0] * len(devices)))
    layers: list[str] = []
    number = groups_here = 0
    for index, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        full = filled + size / 2 > total * shares[number] / shares[-1]
        needed = len(groups) - index < len(devices) - number  # each of the others gets one at least
        if groups_here and (full or needed) and number < len(devices) - 1:
            number, groups_here = number + 1, 0
        layers += [devices[number]] * len(group)
        filled, groups_here = filled + size, groups_here + 1
    return Places(tuple(layers), devices[0], devices[0] if config.tied else devices[-1])


def _together(config: ModelConfig) -> list[list[int]]:
    """Layers by those that must lie in one place, because they read each other's keys."""
    borrowing = range(config.layers - config.kv_shared, config.layers)
    start = min((config.kv_source(layer) for layer in borrowing), default=config.layers)
    alone = [[layer] for layer in range(start)]
    return [*alone, list(range(start, config.layers))] if borrowing else alone


def _group_sizes(config: ModelConfig, groups: list[list[int]]) -> list[int]:
    """The numbers in the weights of each group; the head counts for the last."""
    of_layer = [0] * config.layers
    for name, shape in shapes(config).items():
        if name.startswith("layers."):
            of_layer[int(name.split(".")[1])] += math.prod(shape)
        elif name.startswith("head."):
            of_layer[-1] += math.prod(shape)
    return [sum(of_layer[layer] for layer in group) for group in groups]
