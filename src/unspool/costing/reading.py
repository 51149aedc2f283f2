"""Logits and negative log-likelihood of the last tokens of many texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from unspool.backends.step import Logits
from unspool.sampling import score
from unspool.session import Session

_BATCH = 8  # texts per batch


def last_logits(
    lm: Session,
    texts: Sequence[Sequence[int]],
    last: int,
    tell: Callable[[float], object] = lambda share: None,
) -> Iterator[Logits]:
    """Yield, for each text, the logits that predict its last `last` tokens."""
    for start in range(0, len(texts), _BATCH):
        group = texts[start : start + _BATCH]
        with ExitStack() as stack:
            branches = [stack.enter_context(lm.open_branch(text[:-1])) for text in group]
            logits = lm.engine.extend_all([(branch, ()) for branch in branches], num_logits=last)
        yield from logits
        tell(min(1.0, (start + len(group)) / len(texts)))


def token_nlls(
    lm: Session,
    texts: Sequence[Sequence[int]],
    last: int,
    tell: Callable[[float], object] = lambda share: None,
) -> NDArray[np.float64]:
    """Return the negative log-likelihood in nats of the last tokens: [texts, last]."""
    rows = zip(texts, last_logits(lm, texts, last, tell), strict=True)
    return np.array([nll(logits, text[-last:]) for text, logits in rows])


def nll(logits: Logits, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Return the negative log-likelihood of each token, in nats."""
    return np.array([-float(value) for value in score(logits, tokens).logprobs])
