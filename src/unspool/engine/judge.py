"""How well a model saw a given text coming, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from unspool.engine.engine import Engine
from unspool.engine.steps import Candidate, Score, TokenScore
from unspool.engine.tree import Branch
from unspool.sampling import score as score_logits

_AT_ONCE = 256  # rows of logits: bounds the memory that a long text needs


def judge(
    engine: Engine,
    branch: Branch,
    ids: Sequence[int],
    *,
    top: int,
    lead: int,
    readable: Callable[[int], str],
) -> Score:
    """Score every token but the first `lead` ones, which are only read.

    The branch has the first token, and gets the others as they are read.
    """
    positions: list[TokenScore] = []
    if not lead:
        positions.append(TokenScore(ids[0], readable(ids[0]), None, None, None))
    for start in range(0, len(ids) - 1, _AT_ONCE):
        end = min(start + _AT_ONCE, len(ids) - 1)
        targets = ids[start + 1 : end + 1]
        logits = engine.extend(branch, ids[max(start, 1) : end], wanted=end - start)
        found = score_logits(logits, targets, top)
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
