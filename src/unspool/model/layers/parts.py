"""Small parts of layers: norms, RoPE, activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.model.config import ModelConfig


class Norm(nn.Module):
    """RMSNorm or LayerNorm, computed in float32 for weights of any dtype."""

    def __init__(self, config: ModelConfig, size: int, kind: str) -> None:
        super().__init__()
        self.eps, self.plus_one = config.norm_eps, config.norm_plus_one
        self.centred = kind == "layer"
        self.weight = nn.Parameter(torch.full((size,), 0.0 if self.plus_one else 1.0))
        has_bias = self.centred and config.norm_bias
        self.bias = nn.Parameter(torch.zeros(size)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(self.mean_square(wide) + self.eps)
        weight = self.weight.float()
        wide = wide * (1 + weight if self.plus_one else weight)
        if self.bias is not None:
            wide = wide + self.bias.float()
        return wide.to(x.dtype)

    def mean_square(self, x: Tensor) -> Tensor:
        return x.pow(2).mean(-1, keepdim=True)


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """RMS-normalize without a weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def apply_rope(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply RoPE: rotate pairs (one number of each half); dimensions beyond the tables pass."""
    width = cosine.shape[-1] * 2
    first, second = x[..., : width // 2], x[..., width // 2 : width]
    rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), -1)


def activate(kind: str, x: Tensor) -> Tensor:
    if kind == "silu":
        return functional.silu(x)
    if kind == "relu":
        return functional.relu(x)
    if kind == "relu2":
        return functional.relu(x).square()
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def gated_activation(config: ModelConfig, gate: Tensor, up: Tensor) -> Tensor:
    """Combine gate and up projection of a gated feed-forward."""
    if config.activation != "swiglu_clamped":
        return activate(config.activation, gate) * up
    limit = config.activation_limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def new_norm_if(config: ModelConfig, has_norm: bool) -> nn.Module:
    return Norm(config, config.width, config.norm) if has_norm else nn.Identity()


class HeadTransform(nn.Module):
    """A dense layer between the last layer and the last norm (BERT)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.norm = new_norm_if(config, config.norm_before)
        self.dense = nn.Linear(config.width, config.width, bias=config.head_transform_bias)

    def forward(self, x: Tensor) -> Tensor:
        return activate(self.activation, self.dense(self.norm(x)))


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
