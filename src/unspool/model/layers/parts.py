"""Small parts of layers: norms, RoPE, activations."""

from __future__ import annotations

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
