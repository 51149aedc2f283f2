"""Scoring given tokens: log-probabilities of a text, and the sampling details of earlier steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from unspool.backends.step import Logits
from unspool.engine.engine import Engine
from unspool.engine.request import Request
from unspool.engine.results import Candidate, Score, Step, TokenScore, explained_step
from unspool.engine.tree import Branch
from unspool.sampling import Chain, RowInput
from unspool.sampling import score as score_logits
from unspool.text.tokenizer.pieces import incomplete_utf8

_CHUNK = 256  # rows of logits computed together: bounds the memory for a long text


def score_tokens(
    engine: Engine,
    branch: Branch,
    ids: Sequence[int],
    *,
    top: int,
    lead: int,
    readable: Callable[[int, bytes], str],
) -> Score:
    """Score every token after the first `lead` ones, which are only read.

    Args:
        engine: Computes the branch.
        branch: Has the first token; the others are appended here.
        ids: The tokens of the text.
        top: How many candidates to record at each position.
        lead: First tokens without a score, such as a start token.
        readable: The text of a token, given an incomplete UTF-8 character before it.
    """
    positions: list[TokenScore] = []
    if not lead:
        positions.append(TokenScore(ids[0], readable(ids[0], b""), None, None, None))
    partial = incomplete_utf8(engine.token_bytes(ids[0]))
    for start in range(0, len(ids) - 1, _CHUNK):
        end = min(start + _CHUNK, len(ids) - 1)
        targets = ids[start + 1 : end + 1]
        logits = engine.extend(branch, ids[max(start, 1) : end], num_logits=end - start)
        scores = score_logits(logits, targets, top)
        for row, token in enumerate(targets):
            best = zip(scores.top_tokens[row], scores.top_logprobs[row], strict=True)
            positions.append(
                TokenScore(
                    token=token,
                    text=readable(token, partial),
                    logprob=float(scores.logprobs[row]),
                    rank=int(scores.ranks[row]),
                    entropy=float(scores.entropies[row]),
                    candidates=tuple(
                        Candidate(int(t), readable(int(t), partial), float(p), math.exp(p))
                        for t, p in best
                    ),
                )
            )
            partial = incomplete_utf8(partial + engine.token_bytes(token))
    return Score(positions)


def chosen_steps(
    logits: Logits, tokens: Sequence[int], position: int, token_bytes: Callable[[int], bytes]
) -> list[Step]:
    """Return steps for tokens that a person chose, with the model's scores.

    The first token is at `position`. The text of each step is that of its single token.
    """
    scores = score_logits(logits, tokens)
    return [
        Step(
            token=token,
            bytes=token_bytes(token),
            text=token_bytes(token).decode("utf-8", "replace"),
            logprob=float(scores.logprobs[row]),
            position=position + row,
            rank=int(scores.ranks[row]),
            entropy=float(scores.entropies[row]),
            probability=1.0,
            chosen=True,
        )
        for row, token in enumerate(tokens)
    ]


def explain(
    engine: Engine, branch: Branch, request: Request, steps: Sequence[Step], top: int
) -> list[Step]:
    """Return the steps with all details of the sampling.

    The branch has the prompt. Each token is sampled again with the same random number. Where the
    step has another token (chosen by a person, or after a guard), only the model's own scores of
    that token are added.
    """
    chain, state = Chain([request.settings]), None
    history, explained = list(request.prompt), list[Step]()
    for start in range(0, len(steps), _CHUNK):
        part = steps[start : start + _CHUNK]
        tokens = [step.token for step in steps[max(0, start - 1) : start + len(part) - 1]]
        logits = engine.extend(branch, tokens, num_logits=len(part))
        scores = score_logits(logits, [step.token for step in part])
        for row, step in enumerate(part):
            row_input = RowInput(history, len(request.prompt), request.limits.sample, state=state)
            pick = chain.pick(logits[row : row + 1], [row_input], top=top, explain=True)[0]
            state = pick.state
            history.append(step.token)
            detailed = explained_step(
                pick, step.position, step.text, engine.token_bytes, step.seconds,
                step.finish_reason, step.draft, step.retracts, partial_utf8=step.partial_utf8,
            )  # fmt: skip
            if pick.token != step.token:
                detailed = replace(
                    step,
                    rank=int(scores.ranks[row]),
                    entropy=max(0.0, float(scores.entropies[row])),
                    probability=1.0 if step.chosen else step.probability,
                    candidates=detailed.candidates,
                )
            explained.append(detailed)
    return explained
