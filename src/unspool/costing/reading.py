"""Reading for the parts: how likely the model finds the last tokens of many texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from unspool.backends.step import Logits
from unspool.sampling import score
from unspool.session import Session

_TOGETHER = 8  # texts that are read in the same steps


def last_logits(
    lm: Session,
    texts: Sequence[Sequence[int]],
    last: int,
    tell: Callable[[float], object] = lambda share: None,
) -> Iterator[Logits]:
    """Of each text, what the model expected in the place of its last so many tokens."""
    for start in range(0, len(texts), _TOGETHER):
        group = texts[start : start + _TOGETHER]
        with ExitStack() as held:
            branches = [held.enter_context(lm.opened(text[:-1])) for text in group]
            found = lm.engine.extend_all([(branch, ()) for branch in branches], wanted=last)
        yield from found
        tell(min(1.0, (start + len(group)) / len(texts)))


def surprises(
    lm: Session,
    texts: Sequence[Sequence[int]],
    last: int,
    tell: Callable[[float], object] = lambda share: None,
) -> NDArray[np.float64]:
    """The negative log-likelihood, in nats, of the last so many tokens: [texts, last]."""
    rows = zip(texts, last_logits(lm, texts, last, tell), strict=True)
    return np.array([nats(logits, text[-last:]) for text, logits in rows])


def nats(logits: Logits, tokens: Sequence[int]) -> NDArray[np.float64]:
    """How unexpected each token was."""
    return np.array([-float(value) for value in score(logits, tokens).logprobs])
