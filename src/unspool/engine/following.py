"""What follows a text token by token: its grammar, its thoughts, or the two as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unspool.engine.ending import Ending
from unspool.engine.request import Request
from unspool.engine.thinking import ThinkingState
from unspool.sampling import GrammarState, StageState


@dataclass(slots=True)
class Mark:
    """What must be known of a written token to go back to just behind it."""

    state: StageState | None
    ending: Ending | None  # a copy, kept only where going back may be needed


def follow(
    request: Request, token_bytes: Callable[[int], bytes], vocab_size: int
) -> tuple[GrammarState | ThinkingState | None, ThinkingState | None]:
    """What says which tokens may come in a text, if there is such; and where its thoughts are."""
    grammar = None if request.grammar is None else request.grammar.start()
    if request.thinking is None:
        return grammar, None
    thoughts = ThinkingState(request.thinking, grammar, token_bytes, vocab_size)
    is_bound = grammar is not None or request.thinking.budget is not None
    return (thoughts if is_bound else None), thoughts


def may_be_bound(grammar: GrammarState | ThinkingState) -> bool:
    """Whether one token more may leave only one that can follow it."""
    return not isinstance(grammar, ThinkingState) or grammar.is_near_budget
