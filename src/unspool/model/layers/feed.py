"""Feed-forwards: what a layer makes of each position by itself; experts, of which a few do it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.model.config import ModelConfig
from unspool.model.layers.parts import activate, bend

SMALLEST_SUM = 1e-6  # sigmoids of a router may all be next to nothing


class FeedForward(nn.Module):
    """Each position by itself: widen, bend, and narrow again."""

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
        return self.down(bend(self.config, self.gate(x), self.up(x)))


class Stacked(nn.Module):
    """The same matrix of every expert, one above the other."""

    def __init__(self, experts: int, rows: int, columns: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, rows, columns) * columns**-0.5)
        self.bias = nn.Parameter(torch.zeros(experts, rows)) if bias else None

    def forward(self, x: Tensor, expert: int) -> Tensor:
        bias = None if self.bias is None else self.bias[expert]
        return functional.linear(x, self.weight[expert], bias)


class Experts(nn.Module):
    """Many feed-forwards, of which a router picks a few for each token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        count, inner, width = config.experts, config.expert_width, config.width
        self.router = nn.Linear(width, count, bias=config.router_bias)
        self.gate: Stacked | None = None
        if config.gated:
            self.gate = Stacked(count, inner, width, config.expert_bias)
        self.up = Stacked(count, inner, width, config.expert_bias)
        self.down = Stacked(count, width, inner, config.expert_bias)
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
        """What the experts say to `x`: those of a `choice` (see `choose`), or the router's."""
        tokens = x.flatten(0, -2)
        total = self.answers(tokens, *(self.choose(tokens) if choice is None else choice))
        if self.shared is not None:
            said = self.shared(tokens)
            gate = self.shared_gate
            total = total + (said if gate is None else torch.sigmoid(gate(tokens)) * said)
        return total.view_as(x)

    def answers(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """What the chosen experts say to each, weighed and summed."""
        total = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():  # only the experts that somebody asked for
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            picked = tokens[rows]
            up = self.up(picked, expert)
            if self.gate is None:
                bent = activate(self.config.activation, up)
            else:
                bent = bend(self.config, self.gate(picked, expert), up)
            answer = self.down(bent, expert)
            total.index_add_(0, rows, answer * weights[rows, place, None].to(answer.dtype))
        return total

    def choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of each token's experts, and their numbers."""
        config, scores = self.config, self.router(tokens).float()
        chances = scores.sigmoid() if config.router == "sigmoid" else scores.softmax(-1)
        wanted = chances if self.selection_bias is None else chances + self.selection_bias.float()
        chosen = wanted.topk(config.experts_per_token, dim=-1).indices
        weights = chances.gather(-1, chosen)
        if config.normalize_experts:
            whole = weights.sum(-1, keepdim=True)
            weights = weights / (whole + SMALLEST_SUM if config.router == "sigmoid" else whole)
        return weights * config.experts_scale, chosen
