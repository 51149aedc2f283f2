"""Nearest tokens by embedding: which tokens the model takes in as nearly the same.

for near in neighbours(lm, " leaves"):
    print(near.text, near.similarity)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from unspool.errors import SettingsError
from unspool.lens.subject import checked_token
from unspool.lens.weights import Doubles, embedding, embeddings
from unspool.session import Session


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A token, and how near it lies."""

    token: int
    text: str
    similarity: float  # cosine of the angle between the embeddings: 1 is the same direction

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def neighbours(lm: Session, token: int | str, count: int = 10) -> tuple[Neighbour, ...]:
    """The tokens whose embeddings point most nearly the same way, nearest first.

    A text must be a single token (most words are one with a space before them).
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise SettingsError(f"count is {count!r}; it may be a whole number from 0 up")
    token = checked_token(lm, token)
    own = embedding(lm, token).astype(np.float64)
    own /= np.linalg.norm(own) or 1.0
    similar = np.concatenate([_cosines(rows, own) for rows in embeddings(lm)])
    similar[token] = -np.inf  # everybody is nearest to themselves
    order = np.argsort(-similar, kind="stable")[: min(count, len(similar) - 1)]
    return tuple(Neighbour(int(t), lm.readable(int(t)), float(similar[t])) for t in order)


def _cosines(rows: np.ndarray[Any, np.dtype[np.float32]], own: Doubles) -> Doubles:
    lengths = np.linalg.norm(rows, axis=-1).astype(np.float64)
    # A row of zeros (padding of the vocabulary) has no direction: near to nothing.
    return np.asarray((rows @ own) / np.where(lengths > 0, lengths, 1.0))
