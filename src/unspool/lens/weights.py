"""What the lenses read of a model's weights, as numpy arrays: the one place that uses torch.

Another backend that keeps its weights elsewhere has to offer what stands here, and nothing more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from unspool.backends.base import Floats
from unspool.lens.subject import Subject

if TYPE_CHECKING:
    from torch import Tensor

Doubles = npt.NDArray[np.float64]

_ROWS_AT_ONCE = 4096  # of the embedding table: memory stays bounded however large the vocabulary
_SAMPLED = 64  # numbers of each tensor that go into the fingerprint


def says(lm: Subject, vectors: Floats) -> Floats:
    """The logits [n, vocabulary] that final norm and head make of vectors [n, width]."""
    import torch

    weight = lm.transformer.embed.weight
    with torch.inference_mode():
        x = torch.from_numpy(np.ascontiguousarray(vectors)).to(weight.device, weight.dtype)
        return host(lm.transformer.logits(x))


def host(array: Any) -> Floats:
    """Numbers of the run, wherever they lie, as a numpy array."""
    if isinstance(array, np.ndarray):
        return np.asarray(array, np.float32)
    return np.asarray(array.detach().float().cpu().numpy())


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """The last norm: (x, centred or not) / its size * weight + bias."""

    weight: Doubles
    bias: Doubles | None
    eps: float
    centred: bool  # LayerNorm takes the mean away first, RMSNorm does not


def final_norm(lm: Subject) -> FinalNorm:
    norm = lm.transformer.norm
    weight = _doubles(norm.weight)
    return FinalNorm(
        weight=1 + weight if norm.plus_one else weight,
        bias=None if norm.bias is None else _doubles(norm.bias),
        eps=norm.eps,
        centred=norm.bias is not None,
    )


def head_row(lm: Subject, token: int | Literal["mean"]) -> tuple[Doubles, float]:
    """What a normalized vector is multiplied with for this token's logit, and the bias added."""
    import torch

    head = lm.transformer.head
    weight = (head or lm.transformer.embed).weight
    bias = head.bias if head is not None else None
    if token == "mean":
        row = weight.detach().mean(0, dtype=torch.float64)
        return _doubles(row), 0.0 if bias is None else float(bias.detach().double().mean())
    return _doubles(weight[token]), 0.0 if bias is None else float(bias[token].detach())


def embeddings(lm: Subject) -> Iterator[Floats]:
    """The embedding table in pieces [rows, width], first tokens first."""
    weight = lm.transformer.embed.weight
    for start in range(0, weight.shape[0], _ROWS_AT_ONCE):
        yield host(weight[start : start + _ROWS_AT_ONCE])


def embedding(lm: Subject, token: int) -> Floats:
    return host(lm.transformer.embed.weight[token])


def precision(lm: Subject) -> str:
    """The kind of number the weights are in: float32, bfloat16, ..."""
    return str(lm.transformer.embed.weight.dtype).removeprefix("torch.")


def weights_hash(lm: Subject) -> str:
    """A cheap hash: names and shapes of all tensors, and a few numbers from all over each."""
    import torch

    seen = hashlib.sha256()
    for name, tensor in sorted(lm.transformer.named_parameters()):
        seen.update(f"{name} {tuple(tensor.shape)}".encode())
        spots = np.linspace(0, tensor.numel() - 1, _SAMPLED).astype(np.int64)
        places = torch.unravel_index(torch.from_numpy(spots).to(tensor.device), tensor.shape)
        seen.update(host(tensor.detach()[places]).astype("<f4").tobytes())
    return seen.hexdigest()


def _doubles(tensor: Tensor) -> Doubles:
    return np.asarray(tensor.detach().double().cpu().numpy())
