"""Array operations of drafting heads that work on numpy arrays and torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # a numpy array or a torch tensor


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """RMSNorm."""
    return x / ((x * x).mean(-1, keepdims=True) + epsilon) ** 0.5 * weight


def silu(x: Array) -> Array:
    return x / (1.0 + _exp(-x))


def apply_rope(x: Array, cosine: Array, sine: Array) -> Array:
    """Apply RoPE to heads [n, heads, width] with cos and sin tables [n, width / 2]."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    cosine, sine = cosine[:, None], sine[:, None]
    return concat([a * cosine - b * sine, b * cosine + a * sine], -1)


def attention(query: Array, keys: Array, values: Array) -> Array:
    """Attention of queries [n, heads, width] over keys and values [n, t, kv heads, width], or
    [t, kv heads, width] shared by all; returns [n, heads * width]."""
    count, heads, width = query.shape
    kv_heads = keys.shape[-2]
    grouped = query.reshape(count, kv_heads, heads // kv_heads, width)
    per_head = keys.swapaxes(-3, -2)  # [..., key heads, t, width]
    scores = grouped @ per_head.swapaxes(-1, -2) / width**0.5
    mixed = softmax(scores) @ values.swapaxes(-3, -2)
    return mixed.reshape(count, heads * width)


def softmax(x: Array) -> Array:
    most = x.max(-1, keepdims=True) if isinstance(x, np.ndarray) else x.amax(-1, keepdim=True)
    grown = _exp(x - most)
    return grown / grown.sum(-1, keepdims=True)


def concat(parts: list[Array], axis: int) -> Array:
    """Concatenate; if any part is on a device, the others are moved there."""
    if len(parts) == 1:
        return parts[0]
    device = next((part.device for part in parts if not isinstance(part, np.ndarray)), None)
    if device is None:
        return np.concatenate(parts, axis)
    import torch

    return torch.cat([to_device(device)(part) for part in parts], axis)


def _exp(x: Array) -> Array:
    return np.exp(x) if isinstance(x, np.ndarray) else x.exp()


def to_device(device: Any) -> Any:
    """Build the function that moves an array to a device; None: leave it as a numpy array."""
    if device is None:
        return lambda array: array
    import torch

    def transfer(array: Array) -> Array:
        tensor = torch.from_numpy(np.array(array)) if isinstance(array, np.ndarray) else array
        return tensor.to(device).float()

    return transfer


def to_host(array: Array) -> Any:
    return array if isinstance(array, np.ndarray) else array.float().cpu().numpy()
