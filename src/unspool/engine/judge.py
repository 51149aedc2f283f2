"""What a model thinks of tokens that are given: how well it saw them coming, and how steps that
were written without an explanation came about."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from unspool.backends.step import Logits
from unspool.engine.branch import Branch
from unspool.engine.engine import Engine
from unspool.engine.request import Request
from unspool.engine.steps import Candidate, Score, Step, TokenScore, explained_step
from unspool.sampling import Chain, RowInput
from unspool.sampling import score as score_logits
from unspool.text.tokenizer.characters import unfinished

_AT_ONCE = 256  # rows of logits: bounds the memory that a long text needs


def judge(
    engine: Engine,
    branch: Branch,
    ids: Sequence[int],
    *,
    top: int,
    lead: int,
    readable: Callable[[int, bytes], str],
) -> Score:
    """Score every token but the first `lead` ones, which are only read.

    The branch has the first token, and gets the others as they are read.
    """
    positions: list[TokenScore] = []
    if not lead:
        positions.append(TokenScore(ids[0], readable(ids[0], b""), None, None, None))
    begun = unfinished(engine.token_bytes(ids[0]))
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
                    text=readable(token, begun),
                    logprob=float(found.logprobs[row]),
                    rank=int(found.ranks[row]),
                    entropy=float(found.entropies[row]),
                    candidates=tuple(
                        Candidate(int(t), readable(int(t), begun), float(p), math.exp(p))
                        for t, p in best
                    ),
                )
            )
            begun = unfinished(begun + engine.token_bytes(token))
    return Score(positions)


def chosen_steps(
    logits: Logits, tokens: Sequence[int], position: int, token_bytes: Callable[[int], bytes]
) -> list[Step]:
    """Steps for tokens that the model did not pick itself, from this position on, as it judges
    them. Their texts are those of the single tokens."""
    found = score_logits(logits, tokens)
    return [
        Step(
            token=token,
            bytes=token_bytes(token),
            text=token_bytes(token).decode("utf-8", "replace"),
            logprob=float(found.logprobs[row]),
            position=position + row,
            rank=int(found.ranks[row]),
            entropy=float(found.entropies[row]),
            probability=1.0,
            chosen=True,
        )
        for row, token in enumerate(tokens)
    ]


def explain(
    engine: Engine, branch: Branch, request: Request, steps: Sequence[Step], top: int
) -> list[Step]:
    """The steps with all that sampling can say of how they were picked.

    The branch has the prompt. Each pick is made again, with the same draw; where the step has
    another token (a person chose it, or a guard had a part in it), only what the model itself
    thought of that token is told.
    """
    chain, state = Chain([request.settings]), None
    history, explained = list(request.prompt), list[Step]()
    for start in range(0, len(steps), _AT_ONCE):
        part = steps[start : start + _AT_ONCE]
        read = [step.token for step in steps[max(0, start - 1) : start + len(part) - 1]]
        logits = engine.extend(branch, read, wanted=len(part))
        found = score_logits(logits, [step.token for step in part])
        for row, step in enumerate(part):
            given = RowInput(history, len(request.prompt), request.limits.sample, state=state)
            pick = chain.pick(logits[row : row + 1], [given], top=top, explain=True)[0]
            state = pick.state
            history.append(step.token)
            made = explained_step(
                pick, step.position, step.text, engine.token_bytes, step.seconds,
                step.finish_reason, step.draft, step.retracts, begun=step.begun,
            )  # fmt: skip
            if pick.token != step.token:
                made = replace(
                    step,
                    rank=int(found.ranks[row]),
                    entropy=max(0.0, float(found.entropies[row])),
                    probability=1.0 if step.chosen else step.probability,
                    candidates=made.candidates,
                )
            explained.append(made)
    return explained
