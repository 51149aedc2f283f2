"""The arithmetic of drafting heads, for arrays of numpy and tensors of torch alike."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # of numpy, or a tensor


def normed(x: Array, weight: Array, epsilon: float) -> Array:
    """RMSNorm."""
    return x / ((x * x).mean(-1, keepdims=True) + epsilon) ** 0.5 * weight


def silu(x: Array) -> Array:
    return x / (1.0 + _exp(-x))


def turned(x: Array, cosine: Array, sine: Array) -> Array:
    """Heads [n, heads, width] turned by the angles of their positions [n, width / 2]."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    cosine, sine = cosine[:, None], sine[:, None]
    return joined([a * cosine - b * sine, b * cosine + a * sine], -1)


def attended(query: Array, keys: Array, values: Array) -> Array:
    """What queries [n, heads, width] gather from keys and values [n, t, key heads, width], or
    [t, key heads, width] for all of them: [n, heads * width]."""
    count, heads, width = query.shape
    kept = keys.shape[-2]
    grouped = query.reshape(count, kept, heads // kept, width)
    each = keys.swapaxes(-3, -2)  # [..., key heads, t, width]
    scores = grouped @ each.swapaxes(-1, -2) / width**0.5
    found = softmax(scores) @ values.swapaxes(-3, -2)
    return found.reshape(count, heads * width)


def softmax(x: Array) -> Array:
    most = x.max(-1, keepdims=True) if isinstance(x, np.ndarray) else x.amax(-1, keepdim=True)
    grown = _exp(x - most)
    return grown / grown.sum(-1, keepdims=True)


def joined(parts: list[Array], axis: int) -> Array:
    """What lies on a device stays there, and the rest is brought to it."""
    if len(parts) == 1:
        return parts[0]
    device = next((part.device for part in parts if not isinstance(part, np.ndarray)), None)
    if device is None:
        return np.concatenate(parts, axis)
    import torch

    return torch.cat([on(device)(part) for part in parts], axis)


def _exp(x: Array) -> Array:
    return np.exp(x) if isinstance(x, np.ndarray) else x.exp()


def on(device: Any) -> Any:
    """What puts an array where the arithmetic is done; None: it stays one of numpy."""
    if device is None:
        return lambda array: array
    import torch

    def put(array: Array) -> Array:
        there = torch.from_numpy(np.array(array)) if isinstance(array, np.ndarray) else array
        return there.to(device).float()

    return put


def host(array: Array) -> Any:
    return array if isinstance(array, np.ndarray) else array.float().cpu().numpy()
