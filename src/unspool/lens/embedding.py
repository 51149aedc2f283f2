"""A text as one vector: the mean, over its tokens, of what the model has made of each in the end.

    vector = embedding(lm, "a text")              # [width], of length one
    vectors = embeddings(lm, ["a text", "more"])  # [texts, width]

The vectors after the last layer go through the final norm, are averaged over all positions, and
the mean is scaled to length one. A model that was never trained for this gives vectors in which
similar texts lie near each other, but not as well as one that was.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unspool.backends.step import Floats
from unspool.errors import UnspoolError
from unspool.lens.subject import Text, adapter_of, tokens_of
from unspool.session import Session

_AT_ONCE = 128  # tokens whose vectors after every layer are in memory together


def embeddings(lm: Session, texts: Sequence[Text]) -> Floats:
    """The vectors of several texts, one row each; all texts are checked before any is computed."""
    token_lists: list[list[int]] = []
    for number, text in enumerate(texts):
        try:
            token_lists.append(tokens_of(lm, text))
        except UnspoolError as error:
            raise type(error)(f"text {number}: {error}") from None
    return np.stack(
        [
            _mean_vector(lm, tokens, adapter_of(text))
            for tokens, text in zip(token_lists, texts, strict=True)
        ]
    )


def embedding(lm: Session, text: Text) -> Floats:
    """The mean of the text's final vectors, scaled to length one."""
    return _mean_vector(lm, tokens_of(lm, text), adapter_of(text))


def _mean_vector(lm: Session, tokens: list[int], adapter: str | None) -> Floats:
    total = np.zeros(lm.config.width, np.float64)
    with lm.opened(tokens[:1], adapter) as branch:
        for start in range(0, len(tokens), _AT_ONCE):
            end = min(start + _AT_ONCE, len(tokens))
            added, places = tokens[max(start, 1) : end], frozenset(range(start, end))
            for inside in lm.engine.look(branch, added, at=places, deep=False).inside:
                assert inside.residuals is not None
                total += lm.model.normed(inside.residuals[-1]).sum(0, dtype=np.float64)
    length = float(np.linalg.norm(total))
    return np.asarray(total / length if length else total, np.float32)
