"""Contrastive search (Su et al. 2022): likely, and unlike what stands there already.

    contrastive_search(lm, prompt, k=4, alpha=0.6)

Of the `k` likeliest tokens the one is taken that maximizes

    (1 - alpha) * probability - alpha * (its greatest cosine similarity to any token before)

where tokens are compared by the last hidden vectors that the model forms of them in this very
text. So every candidate has to be read: `k` forks, one batch a token, of which one is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.decoding.written import Branches, Line, Prompt, blank, weigh, whole
from unspool.engine.branch import Branch
from unspool.engine.generation import Generation
from unspool.errors import check_number
from unspool.session import Session

Vectors = npt.NDArray[np.float32]  # [tokens, width], each of length one

# Looking inside also brings every layer's attention, so a long prompt is looked at in pieces.
_LOOK_AT_ONCE = 64


def contrastive_search(
    lm: Session,
    prompt: Prompt,
    *,
    k: int = 4,
    alpha: float = 0.6,
    max_tokens: int = 256,
    stop: str | Sequence[str] = (),
    end: bool = True,
    top: int = 5,
) -> Generation:
    """A text without sampling that does not fall into repetition; `alpha` 0 or `k` 1 is greedy.

    The rest as in `lm.stream`. Going on with the result (`resume`) is greedy.
    """
    whole("k", k)
    check_number("alpha", alpha, 0, 1)
    start = blank(
        lm, prompt, max_tokens=max_tokens, stop=stop, end=end, top=top, explain=False, temperature=0
    )
    line = Line.of(lm, start)
    with Branches(lm.engine, lm.adapter) as held:
        if not line.finished:
            branch, logits, past = _read_prompt(lm, held, start.prompt)
        while not line.finished:
            weighed = weigh([logits], k, top)
            count = min(k, weighed.tokens.shape[1])
            branches = held.move([branch] * count)
            place = frozenset([len(branch)])
            read = lm.engine.look_all(
                [(b, [int(t)]) for b, t in zip(branches, weighed.tokens[0], strict=False)],
                at=place,
            )
            vectors = _vectors(lm, [inside for seen in read for inside in seen.inside])
            alike = (vectors @ past.T).max(1)
            chances = np.exp(weighed.logprobs[0, :count])
            best = int(np.argmax((1 - alpha) * chances - alpha * alike))
            line = line.add(weighed.pick(0, best))
            (branch,) = held.move([branches[best]])
            logits, past = read[best].logits, np.concatenate((past, vectors[best : best + 1]))
    return line.generation()


def _read_prompt(lm: Session, held: Branches, prompt: Sequence[int]) -> tuple[Branch, Any, Vectors]:
    """The prompt's branch, the logits behind it, and the vectors of its tokens."""
    branch = held.open(prompt[:_LOOK_AT_ONCE])
    vectors: list[Vectors] = []
    logits: Any = None
    for first in range(0, len(prompt), _LOOK_AT_ONCE):
        last = min(first + _LOOK_AT_ONCE, len(prompt))
        look = frozenset(range(first, last))
        added = prompt[first:last] if first else ()
        seen = lm.engine.look(branch, added, at=look, deep=False)
        logits = seen.logits
        vectors.append(_vectors(lm, seen.inside))
    return branch, logits, np.concatenate(vectors)


def _vectors(lm: Session, seen: Sequence[Any]) -> Vectors:
    """The last hidden vectors of tokens, as the head sees them, brought to length one."""
    hidden = lm.model.normed(np.concatenate([inside.residuals[-1] for inside in seen]))
    lengths = np.linalg.norm(hidden, axis=-1, keepdims=True)
    found: Vectors = hidden / np.maximum(lengths, np.float32(1e-12))  # nothing stays nothing
    return found
