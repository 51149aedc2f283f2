"""How likely whole texts are that begin alike: exact, with the beginning computed once.

The tokens that all texts share are one branch; each text is a fork of it, which reads only what it
has of its own. The numbers are those of `lm.score`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from unspool.backends.step import Logits
from unspool.decoding.written import Branches
from unspool.engine.picking import joined
from unspool.engine.steps import Candidate, Step
from unspool.sampling import score
from unspool.session import Session
from unspool.text.tokenizer.stream import TextStream

_AT_ONCE = 256  # rows of logits: bounds the memory that many candidates need
_FORKS = 32  # texts computed in one batch


def shared_length(rows: Sequence[Sequence[int]]) -> int:
    """How many first tokens all rows have in common; each keeps at least one of its own."""
    shortest = min(map(len, rows)) - 1
    columns = zip(*(row[:shortest] for row in rows), strict=True)
    return next((n for n, column in enumerate(columns) if len({*column}) > 1), shortest)


def scored(
    lm: Session, rows: Sequence[Sequence[int]], shared: int, top: int = 0
) -> list[list[Step]]:
    """Each row's tokens from position `shared` on, as the model judges them; all rows have the
    tokens before that in common, and at least one more."""
    found = list[list[Step]]()
    with Branches(lm.engine, lm.adapter) as held:
        root = held.open(rows[0][:shared])
        first = lm.engine.extend(root)
        for group in _groups(rows, shared):
            read = [row for row in group if len(row) > shared + 1]
            root, *forks = held.move([root] * (len(read) + 1))
            additions = [(fork, row[shared:-1]) for fork, row in zip(forks, read, strict=True)]
            wanted = [len(tokens) for _, tokens in additions]
            behind = iter(lm.engine.extend_all(additions, wanted=wanted)) if read else iter(())
            for row in group:
                logits = joined([first, next(behind)]) if len(row) > shared + 1 else first
                found.append(judged_steps(lm, logits, row[shared:], shared, top))
            held.move([root])
    return found


def _groups(rows: Sequence[Sequence[int]], shared: int) -> Iterator[list[Sequence[int]]]:
    group, size = list[Sequence[int]](), 0
    for row in rows:
        if group and (size + len(row) - shared > _AT_ONCE or len(group) == _FORKS):
            yield group
            group, size = [], 0
        group.append(row)
        size += len(row) - shared
    yield group


def judged_steps(
    lm: Session, logits: Logits, tokens: Sequence[int], position: int, top: int
) -> list[Step]:
    """Steps for tokens that stand there already, from the logits before each of them."""
    found, stream, steps = score(logits, tokens, top), TextStream(), list[Step]()
    for row, token in enumerate(tokens):
        piece, begun = lm.engine.token_bytes(token), stream.half
        best = zip(found.top_tokens[row], found.top_logprobs[row], strict=True)
        steps.append(
            Step(
                token=token,
                bytes=piece,
                text=stream.push(piece),
                logprob=float(found.logprobs[row]),
                position=position + row,
                rank=int(found.ranks[row]),
                entropy=float(found.entropies[row]),
                probability=1.0,
                candidates=tuple(
                    Candidate(int(t), lm.readable(int(t), begun), float(p), math.exp(p))
                    for t, p in best
                ),
                begun=begun,
            )
        )
    return steps
