"""How much arithmetic a token costs, and how much of a device's best training uses.

A matrix of N numbers costs 2N operations a token forward (a multiplication and an addition each)
and twice that backward: 6N. Attention adds, in each layer, two products of a query with every
token it may see. As is usual (PaLM's report, nanochat), a token counts as seeing the whole length,
so that figures compare; `causal=True` counts only what it really sees, about half.

    cost = training_flops(config, length=2048)              # of one token
    mfu(config, 2048, tokens_per_second=1.1e6, peak=peak_flops("NVIDIA H200"))
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from unspool.model.config import ModelConfig
from unspool.model.weights import shapes

if TYPE_CHECKING:
    import torch

# bf16 without sparsity, as the makers' data sheets have it; a device is known by part of its name.
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

_LOOKED_UP = ("embed.weight", "position_embed.weight", "token_inputs.embed.weight")


def compute_parameters(config: ModelConfig) -> int:
    """The numbers that a token is multiplied with: every matrix of its way, the head included.

    Looking up an embedding costs nothing, and of experts only those that are picked work.
    """
    total = 0
    for name, shape in shapes(config).items():
        if len(shape) == 3:  # the matrices of all experts
            total += math.prod(shape[1:]) * config.experts_per_token
        elif len(shape) == 2 and name not in _LOOKED_UP:
            total += math.prod(shape)
    return total + config.vocab_size * config.width * config.tied


def attention_flops(config: ModelConfig, length: int, *, causal: bool = False) -> float:
    """Forward, of one token on average: what queries do with keys, and weights with values; or what
    is done to a recurrent layer's state, to fade, be searched, corrected and read."""
    total = 0.0
    for layer in range(config.layers):
        if config.mixer(layer) != "attention":
            total += 7 * config.state_floats(layer)
            continue
        span = min(config.window(layer) or length, length)
        total += 4 * config.shape(layer).out_width * _seen(span, length, causal)
    return total


def _seen(span: int, length: int, causal: bool) -> float:
    """How many tokens one sees on average, where each sees at most the last `span`."""
    if not causal:
        return span
    return (span * (span + 1) / 2 + (length - span) * span) / length


def forward_flops(config: ModelConfig, length: int, *, causal: bool = False) -> float:
    """Of one token, in a text of `length`."""
    return 2 * compute_parameters(config) + attention_flops(config, length, causal=causal)


def training_flops(config: ModelConfig, length: int, *, causal: bool = False) -> float:
    """Of one token, forward and backward: 6N and attention."""
    return 3 * forward_flops(config, length, causal=causal)


def peak_flops(device_name: str) -> float | None:
    """What a device can do at most in bf16; None if it is not in the table."""
    return next((peak for name, peak in _PEAKS.items() if name in device_name), None)


def device_peak(device: torch.device) -> float | None:
    """That of a GPU of this machine; None for processors."""
    import torch

    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def mfu(config: ModelConfig, length: int, tokens_per_second: float, peak: float) -> float:
    """The share of the device's best that goes into the model's own arithmetic."""
    return training_flops(config, length) * tokens_per_second / peak
