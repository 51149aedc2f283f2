"""Nearest tokens by embedding.

for neighbour in neighbours(lm, " leaves"):
    print(neighbour.text, neighbour.similarity)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from unspool.errors import SettingsError
from unspool.lens.subject import resolve_token
from unspool.lens.weights import Doubles, embedding_rows, token_embedding
from unspool.session import Session


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A token and its similarity."""

    token: int
    text: str
    similarity: float  # cosine similarity of the embeddings

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def neighbours(lm: Session, token: int | str, count: int = 10) -> tuple[Neighbour, ...]:
    """Tokens with the most similar embeddings, nearest first.

    `token` is an id, or text that is a single token (most words are, with a space before).
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise SettingsError(f"count must be an integer >= 0, got {count!r}")
    token = resolve_token(lm, token)
    vector = token_embedding(lm, token).astype(np.float64)
    vector /= np.linalg.norm(vector) or 1.0
    similarities = np.concatenate([_cosines(rows, vector) for rows in embedding_rows(lm)])
    similarities[token] = -np.inf  # not the token itself
    nearest = np.argsort(-similarities, kind="stable")[: min(count, len(similarities) - 1)]
    return tuple(Neighbour(int(t), lm.readable(int(t)), float(similarities[t])) for t in nearest)


def _cosines(rows: np.ndarray[Any, np.dtype[np.float32]], vector: Doubles) -> Doubles:
    norms = np.linalg.norm(rows, axis=-1).astype(np.float64)
    # Rows of zeros (padding of the vocabulary) have similarity 0.
    return np.asarray((rows @ vector) / np.where(norms > 0, norms, 1.0))
