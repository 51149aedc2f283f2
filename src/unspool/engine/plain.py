"""The plain loop: prefill, pick, append, and round again, one text at a time.

This is the whole of text generation, and the reference for every faster way of doing it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from unspool.engine.ending import Ending, Limits
from unspool.engine.steps import Step, explained_step
from unspool.sampling import Chain, RowInput, SamplingSettings


class RunningText(Protocol):
    """The model's side: append tokens, get the logits of what comes next."""

    def append(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]: ...


def write(
    text: RunningText,
    prompt: Sequence[int],
    settings: SamplingSettings,
    limits: Limits,
    token_bytes: Callable[[int], bytes],
) -> Iterator[Step]:
    """Steps, one a token, until an end token, a stop string, the length or the context's end."""
    chain, ending = Chain([settings]), Ending(limits, len(prompt))
    history, state, started = list(prompt), None, perf_counter()
    tokens: Sequence[int] = prompt  # what the model has not read yet
    for _ in range(limits.room(len(prompt))):
        logits = text.append(tokens)
        row = RowInput(history, len(prompt), limits.sample, state=state)
        pick = chain.pick(logits[None], [row], top=limits.top, explain=limits.explain)[0]
        tokens, state = [pick.token], pick.state
        history.append(pick.token)
        begun = ending.text.half
        shown, finish = ending.push(pick.token, token_bytes(pick.token), len(history))
        if finish:
            shown += ending.finish()
        now = perf_counter()
        yield explained_step(
            pick, len(history) - 1, shown, token_bytes, now - started, finish, begun=begun
        )
        if finish:
            return
        started = now
