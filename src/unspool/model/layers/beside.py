"""Parts of Gemma 4's layers: experts in parallel with a feed-forward, and per-layer embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unspool.model.config import ModelConfig
from unspool.model.layers.parts import Norm, activate


class DenseAndExperts(nn.Module):
    """A dense feed-forward and a mixture of experts in parallel, each with its own norms; their
    outputs are added."""

    def __init__(self, config: ModelConfig, dense: nn.Module, experts: Any) -> None:
        super().__init__()
        width = config.width
        self.dense = dense
        self.experts: Any = experts
        self.dense_norm, self.dense_post_norm = (Norm(config, width, config.norm) for _ in range(2))
        self.experts_norm, self.experts_post_norm = (
            Norm(config, width, config.norm) for _ in range(2)
        )
        self.router_norm = Norm(config, width, config.norm)
        self.expert_scale = nn.Parameter(torch.ones(config.experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        router_input = self.router_norm(tokens) * tokens.shape[-1] ** -0.5
        weights, expert_ids = self.experts.route(router_input)
        expert_output = self.experts(
            self.experts_norm(tokens), (weights * self.expert_scale[expert_ids], expert_ids)
        )
        dense_output: Tensor = self.dense_post_norm(self.dense(self.dense_norm(x)))
        output: Tensor = dense_output + self.experts_post_norm(expert_output).view_as(x)
        return output


class PerLayerEmbeddings(nn.Module):
    """Per-layer embeddings: a small vector per token and layer, the sum of a table lookup and a
    projection of the token embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width, self.layers = config.token_width, config.layers
        self.embed = nn.Embedding(config.vocab_size, self.layers * self.width)
        self.project = nn.Linear(config.width, self.layers * self.width, bias=False)
        self.norm = Norm(config, self.width, "rms")

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        """[batch, count, layers, width] for `tokens` with embeddings `x`."""
        projected = self.project(x) * x.shape[-1] ** -0.5
        looked_up = self.embed(tokens) * self.width**0.5
        combined: Tensor = self.norm(self._by_layer(projected)) + self._by_layer(looked_up)
        return combined * 2**-0.5

    def _by_layer(self, x: Tensor) -> Tensor:
        by_layer: Tensor = x.unflatten(-1, (self.layers, self.width))
        return by_layer


class PerLayerInput(nn.Module):
    """Adds a layer's per-layer embedding to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate = nn.Linear(config.width, config.token_width, bias=False)
        self.out = nn.Linear(config.token_width, config.width, bias=False)
        self.norm = Norm(config, config.width, config.norm)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        """The vector to add to `x`."""
        output: Tensor = self.norm(self.out(activate(self.activation, self.gate(x)) * token))
        return output
