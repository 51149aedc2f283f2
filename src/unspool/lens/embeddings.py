"""Embeddings: of whole texts, and the nearest tokens of a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from unspool.backends.step import Floats
from unspool.errors import SettingsError, UnspoolError
from unspool.lens.activations import (
    Doubles,
    TextLike,
    adapter_name,
    embedding_rows,
    resolve_token,
    to_token_ids,
    token_embedding,
)
from unspool.session import Session

# -- Text embeddings: the mean over a text's tokens of the final hidden states
#
#     vector = embedding(lm, "a text")              # [width], of length one
#     vectors = embeddings(lm, ["a text", "more"])  # [texts, width]
#
# The hidden states after the last layer go through the final norm and are averaged over all
# positions; the mean is scaled to length one. Similar texts have similar vectors, but less
# reliably than with a model that was trained for embeddings.

_CHUNK_TOKENS = 128  # bounds the memory for hidden states of all layers


def embeddings(lm: Session, texts: Sequence[TextLike]) -> Floats:
    """Embed several texts, one row each. All texts are validated before any is computed."""
    token_lists: list[list[int]] = []
    for number, text in enumerate(texts):
        try:
            token_lists.append(to_token_ids(lm, text))
        except UnspoolError as error:
            raise type(error)(f"text {number}: {error}") from None
    return np.stack(
        [
            _mean_vector(lm, tokens, adapter_name(text))
            for tokens, text in zip(token_lists, texts, strict=True)
        ]
    )


def embedding(lm: Session, text: TextLike) -> Floats:
    """Embed a text: mean of its final hidden states, scaled to length one."""
    return _mean_vector(lm, to_token_ids(lm, text), adapter_name(text))


def _mean_vector(lm: Session, tokens: list[int], adapter: str | None) -> Floats:
    sum_vector = np.zeros(lm.config.width, np.float64)
    with lm.open_branch(tokens[:1], adapter) as branch:
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            end = min(start + _CHUNK_TOKENS, len(tokens))
            new_tokens, positions = tokens[max(start, 1) : end], frozenset(range(start, end))
            for inside in lm.engine.look(branch, new_tokens, at=positions, deep=False).inside:
                assert inside.residuals is not None
                sum_vector += lm.model.normed(inside.residuals[-1]).sum(0, dtype=np.float64)
    norm = float(np.linalg.norm(sum_vector))
    return np.asarray(sum_vector / norm if norm else sum_vector, np.float32)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A token and its similarity."""

    token: int  # its id
    text: str  # in readable form
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
