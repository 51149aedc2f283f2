"""What restricts the tokens of a text: its grammar, its reasoning budget, and its guards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unspool.engine.reasoning import ReasoningState
from unspool.engine.request import Request, StopChecker
from unspool.sampling import GrammarState, StageState

TokenConstraint = GrammarState | ReasoningState
"""Follows a text token by token and says which tokens may come next."""


@dataclass(slots=True)
class RewindPoint:
    """The state right after a written token, for a guard that rewinds to it."""

    sampler_state: StageState | None
    stop_checker: StopChecker  # a copy


class TextConstraints:
    """The part of a sequence that a grammar, a guard or a reasoning format needs.

    Attributes:
        tokens: Limits the next token: the grammar, the reasoning budget, or both as one. None:
            neither is set.
        reasoning: Knows which tokens are reasoning. None: the text has no reasoning.
        guard: Reads every token and may rewind the text or stop it. None: no guard is set.
        rewind_points: One for each written token, where there is a guard.
        num_retracted: Steps that were rewound since the last one that was sent.
    """

    __slots__ = ("_follower", "guard", "num_retracted", "reasoning", "rewind_points", "tokens")

    def __init__(
        self, request: Request, token_bytes: Callable[[int], bytes], vocab_size: int
    ) -> None:
        grammar = None if request.grammar is None else request.grammar.start()
        self.tokens: TokenConstraint | None = grammar
        self.reasoning: ReasoningState | None = None
        if request.thinking is not None:
            self.reasoning = ReasoningState(request.thinking, grammar, token_bytes, vocab_size)
            has_limit = grammar is not None or request.thinking.budget is not None
            self.tokens = self.reasoning if has_limit else None
        self._follower = self.reasoning if self.tokens is None else self.tokens
        self.guard = None if request.guards is None else request.guards.start()
        self.rewind_points: list[RewindPoint] = []
        self.num_retracted = 0

    @staticmethod
    def needed_by(request: Request) -> bool:
        """Return whether a request has any constraint."""
        constraints = (request.grammar, request.thinking, request.guards)
        return any(constraint is not None for constraint in constraints)

    @property
    def is_forcing(self) -> bool:
        """Whether only one token can come next."""
        return self.tokens is not None and bool(self.tokens.forced_tokens())

    @property
    def may_force_soon(self) -> bool:
        """Whether only one token may be possible after the next one."""
        tokens = self.tokens
        if tokens is None:
            return False
        return not isinstance(tokens, ReasoningState) or tokens.is_near_budget

    @property
    def must_end(self) -> bool:
        """Whether no token but an end token can come next."""
        return self.tokens is not None and self.tokens.must_end

    @property
    def is_reasoning(self) -> bool:
        """Whether the last token belongs to the reasoning, or to its tags."""
        return self.reasoning is not None and self.reasoning.is_thought

    def forbidden_tokens(self) -> tuple[int, ...]:
        """Return the tokens that a guard rules out at this position."""
        return () if self.guard is None else tuple(self.guard.forbidden(len(self.guard)))

    def advance(self, token: int) -> None:
        """Take a token that was sampled or is given."""
        if self._follower is not None:
            self._follower.advance(token)

    def rewind(self, num_written: int, num_dropped: int) -> RewindPoint | None:
        """Drop the last tokens so that `num_written` remain; return the state after those."""
        self.num_retracted += len(self.rewind_points) - num_written
        if self._follower is not None:
            self._follower.rewind(num_dropped)
        del self.rewind_points[num_written:]
        return self.rewind_points[-1] if self.rewind_points else None
