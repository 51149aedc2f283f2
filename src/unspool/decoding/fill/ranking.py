"""Exact log-probabilities of texts with a common prefix, which is computed once.

The common prefix is one branch; each text is a fork of it. The numbers equal those of `lm.score`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from unspool.backends.step import Logits
from unspool.decoding.written import HeldBranches
from unspool.engine.picking import concat_logits
from unspool.engine.steps import Candidate, Step
from unspool.sampling import score
from unspool.session import Session
from unspool.text.tokenizer.stream import TextStream

_MAX_LOGIT_ROWS = 256  # per batch: bounds memory use
_MAX_FORKS = 32  # texts per batch


def shared_length(rows: Sequence[Sequence[int]]) -> int:
    """Length of the common prefix; at least one token per row is left out."""
    shortest = min(map(len, rows)) - 1
    columns = zip(*(row[:shortest] for row in rows), strict=True)
    return next((n for n, column in enumerate(columns) if len({*column}) > 1), shortest)


def score_rows(
    lm: Session, rows: Sequence[Sequence[int]], shared: int, top: int = 0
) -> list[list[Step]]:
    """Score each row's tokens from position `shared` on. All rows share the tokens before that and
    have at least one more."""
    results = list[list[Step]]()
    with HeldBranches(lm.engine, lm.adapter) as tracker:
        root = tracker.open(rows[0][:shared])
        first = lm.engine.extend(root)
        for group in _groups(rows, shared):
            read = [row for row in group if len(row) > shared + 1]
            root, *forks = tracker.move([root] * (len(read) + 1))
            additions = [(fork, row[shared:-1]) for fork, row in zip(forks, read, strict=True)]
            num_logits = [len(tokens) for _, tokens in additions]
            rest_logits = (
                iter(lm.engine.extend_all(additions, num_logits=num_logits)) if read else iter(())
            )
            for row in group:
                logits = (
                    concat_logits([first, next(rest_logits)]) if len(row) > shared + 1 else first
                )
                results.append(steps_from_logits(lm, logits, row[shared:], shared, top))
            tracker.move([root])
    return results


def _groups(rows: Sequence[Sequence[int]], shared: int) -> Iterator[list[Sequence[int]]]:
    group, size = list[Sequence[int]](), 0
    for row in rows:
        if group and (size + len(row) - shared > _MAX_LOGIT_ROWS or len(group) == _MAX_FORKS):
            yield group
            group, size = [], 0
        group.append(row)
        size += len(row) - shared
    yield group


def steps_from_logits(
    lm: Session, logits: Logits, tokens: Sequence[int], position: int, top: int
) -> list[Step]:
    """Build steps for given tokens from the logits before each."""
    scores, stream, steps = score(logits, tokens, top), TextStream(), list[Step]()
    for row, token in enumerate(tokens):
        piece, partial_utf8 = lm.engine.token_bytes(token), stream.partial_utf8
        best = zip(scores.top_tokens[row], scores.top_logprobs[row], strict=True)
        steps.append(
            Step(
                token=token,
                bytes=piece,
                text=stream.push(piece),
                logprob=float(scores.logprobs[row]),
                position=position + row,
                rank=int(scores.ranks[row]),
                entropy=float(scores.entropies[row]),
                probability=1.0,
                candidates=tuple(
                    Candidate(int(t), lm.readable(int(t), partial_utf8), float(p), math.exp(p))
                    for t, p in best
                ),
                partial_utf8=partial_utf8,
            )
        )
    return steps
