"""Feed-forward layers: dense, and mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.model.config import ModelConfig
from unspool.model.layers.parts import activate, gated_activation

SMALLEST_SUM = 1e-6  # added to the sum of sigmoid router weights, which may be close to 0


class FeedForward(nn.Module):
    """Dense feed-forward, gated or not."""

    def __init__(self, config: ModelConfig, inner: int) -> None:
        super().__init__()
        self.config = config
        width, bias = config.width, config.ff_bias
        self.gate = nn.Linear(width, inner, bias=bias) if config.gated else None
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(activate(self.config.activation, self.up(x)))
        return self.down(gated_activation(self.config, self.gate(x), self.up(x)))


class ExpertMatrices(nn.Module):
    """One matrix per expert, stacked along the first axis."""

    def __init__(self, experts: int, rows: int, columns: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, rows, columns) * columns**-0.5)
        self.bias = nn.Parameter(torch.zeros(experts, rows)) if bias else None

    def forward(self, x: Tensor, expert: int) -> Tensor:
        bias = None if self.bias is None else self.bias[expert]
        return functional.linear(x, self.weight[expert], bias)


class Experts(nn.Module):
    """Mixture of experts: a router selects a few feed-forwards for each token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        count, inner, width = config.experts, config.expert_width, config.width
        self.router = nn.Linear(width, count, bias=config.router_bias)
        self.gate: ExpertMatrices | None = None
        if config.gated:
            self.gate = ExpertMatrices(count, inner, width, config.expert_bias)
        self.up = ExpertMatrices(count, inner, width, config.expert_bias)
        self.down = ExpertMatrices(count, width, inner, config.expert_bias)
        self.selection_bias: nn.Parameter | None = None
        if config.selection_bias:
            self.selection_bias = nn.Parameter(torch.zeros(config.experts))
        self.shared: FeedForward | None = None
        self.shared_gate: nn.Linear | None = None
        if config.shared_width:
            self.shared = FeedForward(config, config.shared_width)
        if config.shared_width and config.shared_gated:
            self.shared_gate = nn.Linear(config.width, 1, bias=False)

    def forward(self, x: Tensor, choice: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Output for `x` of the experts in `choice` (see `choose`), by default the router's."""
        tokens = x.flatten(0, -2)
        total = self.run_experts(tokens, *(self.route(tokens) if choice is None else choice))
        if self.shared is not None:
            shared_output = self.shared(tokens)
            gate = self.shared_gate
            total = total + (
                shared_output if gate is None else torch.sigmoid(gate(tokens)) * shared_output
            )
        return total.view_as(x)

    def run_experts(self, tokens: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Weighted sum of the selected experts' outputs for each token."""
        total = torch.zeros_like(tokens)
        for expert in expert_ids.unique().tolist():  # only experts that are used
            rows, slot = (expert_ids == expert).nonzero(as_tuple=True)
            selected = tokens[rows]
            up = self.up(selected, expert)
            if self.gate is None:
                hidden = activate(self.config.activation, up)
            else:
                hidden = gated_activation(self.config, self.gate(selected, expert), up)
            output = self.down(hidden, expert)
            total.index_add_(0, rows, output * weights[rows, slot, None].to(output.dtype))
        return total

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids of each token's experts, [tokens, experts_per_token] each."""
        config, scores = self.config, self.router(tokens).float()
        probabilities = scores.sigmoid() if config.router == "sigmoid" else scores.softmax(-1)
        selection_scores = (
            probabilities
            if self.selection_bias is None
            else probabilities + self.selection_bias.float()
        )
        expert_ids = selection_scores.topk(config.experts_per_token, dim=-1).indices
        weights = probabilities.gather(-1, expert_ids)
        if config.normalize_experts:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total + SMALLEST_SUM if config.router == "sigmoid" else total)
        return weights * config.experts_scale, expert_ids
