"""The plain loop: prefill, pick, append, and round again, one text at a time.

This is the whole of text generation, and the reference for every faster way of doing it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from unspool.engine.steps import Candidate, Step
from unspool.errors import ContextError
from unspool.sampling import Chain, Pick, RowInput, SamplingSettings
from unspool.text.tokenizer.stream import TextStream


class RunningText(Protocol):
    """The model's side: append tokens, get the logits of what comes next."""

    def append(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop, and what to record."""

    max_tokens: int = 256
    context: int
    end_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    sample: int = 0  # which of several samples with one seed
    top: int = 0  # candidates to record at each step
    explain: bool = False  # record what each sampling stage did


def check_fits(prompt: Sequence[int], context: int) -> None:
    if len(prompt) > context:
        raise ContextError(
            f"the prompt has {len(prompt):,} tokens and the model's context holds {context:,}; "
            "shorten the prompt"
        )


def write(
    text: RunningText,
    prompt: Sequence[int],
    settings: SamplingSettings,
    limits: Limits,
    token_bytes: Callable[[int], bytes],
) -> Iterator[Step]:
    """Steps, one a token, until an end token, a stop string, the length or the context's end."""
    chain, stream = Chain([settings]), TextStream(limits.stop)
    history, state, started = list(prompt), None, perf_counter()
    tokens: Sequence[int] = prompt  # what the model has not read yet
    for count in range(1, min(limits.max_tokens, limits.context - len(prompt)) + 1):
        logits = text.append(tokens)
        row = RowInput(history, len(prompt), limits.sample, state=state)
        pick = chain.pick(logits[None], [row], top=limits.top, explain=limits.explain)[0]
        tokens, state = [pick.token], pick.state
        history.append(pick.token)
        ended = pick.token in limits.end_ids
        shown = stream.push(b"" if ended else token_bytes(pick.token))
        finish = None
        if ended or stream.stopped is not None:
            finish = "stop"
        elif count == limits.max_tokens:
            finish = "length"
        elif len(history) == limits.context:
            finish = "context"
        if finish:
            shown += stream.finish()
        now = perf_counter()
        yield as_step(pick, len(history) - 1, shown, token_bytes, now - started, finish)
        if finish:
            return
        started = now


def as_step(
    pick: Pick,
    position: int,
    shown: str,
    token_bytes: Callable[[int], bytes],
    seconds: float,
    finish_reason: str | None,
) -> Step:
    """What sampling knows of a pick, with its text."""
    return Step(
        token=pick.token,
        bytes=token_bytes(pick.token),
        text=shown,
        logprob=pick.logprob,
        rank=pick.rank,
        entropy=pick.entropy,
        probability=pick.probability,
        position=position,
        draw=pick.draw,
        candidates=tuple(
            Candidate(c.token, readable(token_bytes(c.token)), c.logprob, c.probability)
            for c in pick.candidates
        ),
        stages=pick.stages,
        seconds=seconds,
        finish_reason=finish_reason,
    )


def readable(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")
