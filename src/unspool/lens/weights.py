"""Weights that the lenses read, as numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from unspool.backends.step import Floats
from unspool.session import Session

Doubles = npt.NDArray[np.float64]

_CHUNK_ROWS = 4096  # bounds the memory for any vocabulary


def to_numpy(array: Any) -> Floats:
    """Convert an array or tensor to a float32 numpy array."""
    if isinstance(array, np.ndarray):
        return np.asarray(array, np.float32)
    return np.asarray(array.detach().float().cpu().numpy())


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """The final norm: (x - mean or x) / rms * weight + bias."""

    weight: Doubles
    bias: Doubles | None
    eps: float
    centred: bool  # LayerNorm subtracts the mean, RMSNorm does not


def final_norm(lm: Session) -> FinalNorm:
    weight, bias = lm.model.vector("norm.weight"), lm.model.vector("norm.bias")
    assert weight is not None, "every norm has a weight"
    return FinalNorm(
        weight=weight.astype(np.float64),
        bias=None if bias is None else bias.astype(np.float64),
        eps=lm.config.norm_eps,
        centred=lm.config.norm == "layer",
    )


def head_row(lm: Session, token: int | Literal["mean"]) -> tuple[Doubles, float | None]:
    """Row of the head and bias of a token, or their means over all tokens."""
    bias, scale = lm.model.vector("head.bias"), lm.config.logit_scale
    if token == "mean":
        total = np.zeros(lm.config.width)
        for rows in _table_chunks(lm, "head.weight"):
            total += rows.sum(0, dtype=np.float64)
        mean = None if bias is None else float(bias.mean(dtype=np.float64)) * scale
        return total / lm.config.vocab_size * scale, mean
    row = lm.model.rows("head.weight", token, token + 1)[0]
    return row.astype(np.float64) * scale, None if bias is None else float(bias[token]) * scale


def embedding_rows(lm: Session) -> Iterator[Floats]:
    """Yield the embedding table in chunks [rows, width]."""
    return _table_chunks(lm, "embed.weight")


def token_embedding(lm: Session, token: int) -> Floats:
    return np.asarray(lm.model.rows("embed.weight", token, token + 1)[0])


def _table_chunks(lm: Session, table: str) -> Iterator[Floats]:
    size = lm.config.vocab_size
    for start in range(0, size, _CHUNK_ROWS):
        yield lm.model.rows(table, start, min(start + _CHUNK_ROWS, size))
