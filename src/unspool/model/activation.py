"""What bends the numbers of a feed-forward between its matrices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from unspool.model.config import ModelConfig


def activate(kind: str, x: Tensor) -> Tensor:
    if kind == "silu":
        return functional.silu(x)
    if kind == "relu":
        return functional.relu(x)
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def bend(config: ModelConfig, gate: Tensor, up: Tensor) -> Tensor:
    """The two sides of a gated feed-forward, made one."""
    if config.activation != "swiglu_clamped":
        return activate(config.activation, gate) * up
    limit = config.activation_limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))
