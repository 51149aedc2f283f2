"""FLOPs per token, and model FLOPs utilization (MFU).

A matrix of N parameters costs 2N FLOPs per token in the forward pass (multiply and add) and twice
that in the backward pass: 6N. Attention adds two products of each query with every visible token in
each layer. As usual (PaLM, nanochat), a token counts as seeing the whole length, so that figures
are comparable; `causal=True` counts only the visible tokens, about half.

    cost = training_flops(config, length=2048)              # of one token
    mfu(config, 2048, tokens_per_second=1.1e6, peak=peak_flops("NVIDIA H200"))
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from unspool.model.config import ModelConfig
from unspool.model.weights import weight_shapes

if TYPE_CHECKING:
    import torch

# Dense bf16 FLOP/s from the data sheets, by part of the device name.
_PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "4090": 165e12,
    "3090": 71e12,
}

_LOOKUP_TABLES = ("embed.weight", "position_embed.weight", "token_inputs.embed.weight")


def compute_parameters(config: ModelConfig) -> int:
    """Parameters that a token is multiplied with: all matrices, the output head included.

    Embedding lookups cost nothing, and only the active experts count.
    """
    total = 0
    for name, shape in weight_shapes(config).items():
        if len(shape) == 3:  # the matrices of all experts
            total += math.prod(shape[1:]) * config.experts_per_token
        elif len(shape) == 2 and name not in _LOOKUP_TABLES:
            total += math.prod(shape)
    return total + config.vocab_size * config.width * config.tied


def attention_flops(config: ModelConfig, length: int, *, causal: bool = False) -> float:
    """Forward FLOPs of one token on average, in attention or in the update of recurrent state."""
    total = 0.0
    for layer in range(config.layers):
        if config.mixer(layer) != "attention":
            total += 7 * config.state_floats(layer)
            continue
        span = min(config.window(layer) or length, length)
        total += 4 * config.shape(layer).out_width * _visible_tokens(span, length, causal)
    return total


def _visible_tokens(span: int, length: int, causal: bool) -> float:
    """Average number of tokens that a query sees, with a window of `span`."""
    if not causal:
        return span
    return (span * (span + 1) / 2 + (length - span) * span) / length


def forward_flops(config: ModelConfig, length: int, *, causal: bool = False) -> float:
    """Forward FLOPs of one token, in a sequence of `length`."""
    return 2 * compute_parameters(config) + attention_flops(config, length, causal=causal)


def training_flops(config: ModelConfig, length: int, *, causal: bool = False) -> float:
    """Forward and backward FLOPs of one token: 6N and attention."""
    return 3 * forward_flops(config, length, causal=causal)


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of a device; None if it is not in the table."""
    return next((peak for name, peak in _PEAKS.items() if name in device_name), None)


def device_peak(device: torch.device) -> float | None:
    """Peak bf16 FLOP/s of a GPU of this machine; None for a CPU."""
    import torch

    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def mfu(config: ModelConfig, length: int, tokens_per_second: float, peak: float) -> float:
    """Model FLOPs utilization: the share of `peak` that the model's own arithmetic uses."""
    return training_flops(config, length) * tokens_per_second / peak
