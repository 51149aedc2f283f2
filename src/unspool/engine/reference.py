"""The reference loop: prefill, sample, append, repeat, one text at a time.

This is all of text generation, and what the engine's faster ways of doing it are tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from unspool.engine.request import Limits, StopChecker
from unspool.engine.results import Step, explained_step
from unspool.sampling import Chain, RowInput, SamplingSettings


class ReferenceModel(Protocol):
    """The model: takes tokens, returns the logits of the next token, [V]."""

    def append(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]: ...


def write(
    model: ReferenceModel,
    prompt: Sequence[int],
    settings: SamplingSettings,
    limits: Limits,
    token_bytes: Callable[[int], bytes],
) -> Iterator[Step]:
    """Yield a step for each token, until an end token, a stop string or a limit."""
    chain, stop_checker = Chain([settings]), StopChecker(limits, len(prompt))
    history, state, started = list(prompt), None, perf_counter()
    tokens: Sequence[int] = prompt  # what the model has not read yet
    for _ in range(limits.room(len(prompt))):
        logits = model.append(tokens)
        row = RowInput(history, len(prompt), limits.sample, state=state)
        pick = chain.pick(logits[None], [row], top=limits.top, explain=limits.explain)[0]
        tokens, state = [pick.token], pick.state
        history.append(pick.token)
        partial = stop_checker.text.partial_utf8
        text_piece, finish = stop_checker.push(pick.token, token_bytes(pick.token), len(history))
        if finish:
            text_piece += stop_checker.finish()
        now = perf_counter()
        yield explained_step(
            pick,
            len(history) - 1,
            text_piece,
            token_bytes,
            now - started,
            finish,
            partial_utf8=partial,
        )
        if finish:
            return
        started = now
