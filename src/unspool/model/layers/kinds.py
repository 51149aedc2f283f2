"""Build the parts of a layer from the model's settings."""

from __future__ import annotations

from torch import nn

from unspool.model.config import ModelConfig
from unspool.model.layers.beside import DenseAndExperts
from unspool.model.layers.delta import DeltaNet
from unspool.model.layers.feed import Experts, FeedForward
from unspool.model.layers.mamba import Mamba2
from unspool.model.layers.mixers import Mixer, ShortConv

_MIXERS: dict[str, type[Mixer]] = {"conv": ShortConv, "delta": DeltaNet, "mamba2": Mamba2}


def new_mixer(config: ModelConfig, layer: int) -> Mixer:
    return _MIXERS[config.mixer(layer)](config, layer)


def new_feed(config: ModelConfig, layer: int) -> nn.Module:
    """A dense feed-forward, experts, or both."""
    if not config.has_experts(layer):
        return FeedForward(config, config.shape(layer).ff_width)
    if not config.dense_beside_experts:
        return Experts(config)
    dense = FeedForward(config, config.shape(layer).ff_width)
    return DenseAndExperts(config, dense, Experts(config))
