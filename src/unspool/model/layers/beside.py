"""What a layer of Gemma 4 has beside the usual: experts next to a feed-forward, and a few numbers
of the token itself for every layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unspool.model.config import ModelConfig
from unspool.model.layers.parts import Norm, activate


class DenseAndExperts(nn.Module):
    """A feed-forward for every token, and experts of which a router picks a few; both read the same
    vector, each through norms of its own, and their answers are added."""

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
        routed = self.router_norm(tokens) * tokens.shape[-1] ** -0.5
        weights, chosen = self.experts.choose(routed)
        answers = self.experts(
            self.experts_norm(tokens), (weights * self.expert_scale[chosen], chosen)
        )
        fed: Tensor = self.dense_post_norm(self.dense(self.dense_norm(x)))
        both: Tensor = fed + self.experts_post_norm(answers).view_as(x)
        return both


class TokenInputs(nn.Module):
    """For every layer a few numbers of each token: looked up in a table of its own, and made from
    the vector that the token begins with."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width, self.layers = config.token_width, config.layers
        self.embed = nn.Embedding(config.vocab_size, self.layers * self.width)
        self.project = nn.Linear(config.width, self.layers * self.width, bias=False)
        self.norm = Norm(config, self.width, "rms")

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        """[batch, count, layers, width] for `tokens` that begin with `x`."""
        made = self.project(x) * x.shape[-1] ** -0.5
        found = self.embed(tokens) * self.width**0.5
        both: Tensor = self.norm(self._by_layer(made)) + self._by_layer(found)
        return both * 2**-0.5

    def _by_layer(self, x: Tensor) -> Tensor:
        apart: Tensor = x.unflatten(-1, (self.layers, self.width))
        return apart


class TokenInput(nn.Module):
    """What one layer makes of its numbers of the token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate = nn.Linear(config.width, config.token_width, bias=False)
        self.out = nn.Linear(config.token_width, config.width, bias=False)
        self.norm = Norm(config, config.width, config.norm)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        """To be added to `x`."""
        added: Tensor = self.norm(self.out(activate(self.activation, self.gate(x)) * token))
        return added
