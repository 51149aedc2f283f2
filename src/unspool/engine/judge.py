"""How well a model saw a given text coming, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from unspool.engine.steps import Candidate, Score, TokenScore
from unspool.sampling import score as score_logits

_AT_ONCE = 256  # rows of logits: bounds the memory that a long text needs


class Reader(Protocol):
    """The model's side: what it says after each of these tokens."""

    def append_all(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]: ...


def judge(
    reader: Reader, ids: Sequence[int], *, top: int, lead: int, readable: Callable[[int], str]
) -> Score:
    """Score every token but the first `lead` ones, which are only read."""
    positions: list[TokenScore] = []
    if not lead:
        positions.append(TokenScore(ids[0], readable(ids[0]), None, None, None))
    for start in range(0, len(ids) - 1, _AT_ONCE):
        read = ids[start : min(start + _AT_ONCE, len(ids) - 1)]
        targets = ids[start + 1 : start + 1 + len(read)]
        found = score_logits(reader.append_all(read), targets, top)
        for row, token in enumerate(targets):
            best = zip(found.top_tokens[row], found.top_logprobs[row], strict=True)
            positions.append(
                TokenScore(
                    token=token,
                    text=readable(token),
                    logprob=float(found.logprobs[row]),
                    rank=int(found.ranks[row]),
                    entropy=float(found.entropies[row]),
                    candidates=tuple(
                        Candidate(int(t), readable(int(t)), float(p), math.exp(p)) for t, p in best
                    ),
                )
            )
    return Score(positions)
