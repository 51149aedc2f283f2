"""Reasoning before the answer: where it is in a text, its token budget, and grammars after it.

`ReasoningState` follows a text token by token, with the interface of a `GrammarState`. Inside the
reasoning every token is allowed until the budget is used up; then only the tokens that end the
reasoning, as the model's chat template writes them. A grammar applies to the answer alone, which
starts after the reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from unspool.errors import SettingsError
from unspool.text.reasoning import (
    CHANNEL,
    HarmonyParser,
    OutputStart,
    ReasoningFormat,
    TagReasoningParser,
    make_output_parser,
    prompt_tail,
    split_reasoning,
)

if TYPE_CHECKING:
    from unspool.engine.results import Step
    from unspool.sampling import GrammarState
    from unspool.sampling.grammar import Mask

CALL = "call"  # as the option `thoughts`: the grammar is that of a tool call


@dataclass(frozen=True, slots=True)
class ReasoningSpec:
    """How the answer to a prompt contains reasoning, as known before it is generated."""

    format: ReasoningFormat
    start: OutputStart
    budget: int | None = None  # most tokens of reasoning
    is_call: bool = False  # the grammar is that of a tool call, which names its own channel
    ends: frozenset[int] = frozenset()  # tokens that end a turn; another turn follows

    def split(self, steps: Sequence[Step]) -> tuple[str, str]:
        """Return the reasoning and the answer of a generated text."""
        pieces = [(step.token, step.text) for step in steps]
        reader = make_output_parser(self.format, self.start, None)
        assert reader is not None
        parts = split_reasoning(reader, pieces)
        if not reader.has_stray_close:
            return parts
        return replace(self, start=OutputStart("inside")).split(steps)

    def mark_steps(self, steps: Sequence[Step]) -> list[Step]:
        """Set `thought` of each step, also of those that a person wrote."""
        state = ReasoningState(self, None, lambda token: b"", 0)
        marked: list[Step] = []
        for step in steps:
            state._follow(step.token, step.bytes)
            is_thought = state.is_thought
            marked.append(step if step.thought == is_thought else replace(step, thought=is_thought))
        return marked


def find_reasoning(
    format: ReasoningFormat,
    prompt: Sequence[int],
    token_text: Callable[[int], str],
    ends: frozenset[int],
) -> ReasoningSpec:
    """Return how the answer to a prompt starts: in the reasoning, before it, or after it."""
    text = "".join(token_text(token) for token in prompt_tail(prompt))
    return ReasoningSpec(format, format.start(prompt, text), ends=ends)


def think_options(
    format: ReasoningFormat | None, think: bool | str | None, options: dict[str, Any]
) -> dict[str, Any]:
    """See `Session.think_options`."""
    budget = options.get("think_budget")
    if format is None:
        if think not in (None, False, "none") or budget:
            raise SettingsError(
                "this model does not reason before it answers: neither its chat template nor its "
                "vocabulary has reasoning; leave out think and think_budget"
            )
        options.pop("think_budget", None)
        return {}
    template_options, options["think_budget"] = format.template_options(think, budget)
    options["thoughts"] = options.get("thoughts") or True
    return template_options


class ReasoningState:
    """The reasoning state of one text. Not thread-safe."""

    __slots__ = (
        "_bytes",
        "_forced",
        "_grammar",
        "_has_grammar",
        "_is_for_grammar",
        "_num_reasoning",
        "_reader",
        "_thinking",
        "_tokens",
        "_vocab_size",
        "_was_aside",
    )  # fmt: skip

    def __init__(
        self,
        thinking: ReasoningSpec,
        grammar: GrammarState | None,
        token_bytes: Callable[[int], bytes],
        vocab_size: int,
    ) -> None:
        self._thinking, self._grammar, self._bytes = thinking, grammar, token_bytes
        self._has_grammar, self._vocab_size = grammar is not None, vocab_size
        self._reset()

    def _reset(self) -> None:
        thinking, format = self._thinking, self._thinking.format
        self._reader: TagReasoningParser | HarmonyParser
        if format.uses_channels:
            self._reader = HarmonyParser(format, thinking.start, parse_calls=True)
        else:
            self._reader = TagReasoningParser(format, thinking.start)
        self._tokens: list[int] = []
        self._is_for_grammar: list[bool] = []  # of each token: whether the grammar reads it
        self._num_reasoning = 0  # tokens
        self._was_aside = False
        self._forced: list[int] = []
        if format.uses_channels and self._has_grammar and thinking.start.state == "before":
            first = format.after_close_ids.index(format.ids[CHANNEL])  # the prompt has the rest
            answer = [] if thinking.is_call else [*format.after_close_ids[first:]]
            self._forced = answer if thinking.budget == 0 else [*format.opening_ids]
        self._close_at_budget()

    def _tokens_to_grammar(self) -> Sequence[int]:
        """Return the tokens between the end of the reasoning and the start of the grammar."""
        tokens, ids = self._thinking.format.after_close_ids, self._thinking.format.ids
        if self._thinking.is_call and self._thinking.format.uses_channels:
            return tokens[: tokens.index(ids[CHANNEL])]  # a tool call names its own channel
        return tokens

    @property
    def is_thought(self) -> bool:
        """Whether the last token is not part of the answer: reasoning, or its tags."""
        return self._was_aside or self._reader.last_is_reasoning

    def mask(self) -> Mask | None:
        """Return which tokens may come next; None: all."""
        if self._forced:
            allowed = np.zeros(self._vocab_size, bool)
            allowed[self._forced[0]] = True
            return allowed
        if self._grammar is None or self._reader.in_reasoning:
            return None
        allowed = self._grammar.mask()
        if self._may_open:
            allowed = allowed.copy()
            allowed[self._thinking.format.ids[self._thinking.format.open]] = True
        return allowed

    @property
    def _may_open(self) -> bool:
        """Whether reasoning may start here, where the grammar would."""
        thinking = self._thinking
        is_first = not self._tokens and thinking.start.state == "before" and thinking.budget != 0
        return (
            is_first
            and not thinking.format.uses_channels
            and thinking.format.open in (thinking.format.ids)
        )

    @property
    def must_end(self) -> bool:
        """Whether the text can only end here."""
        if self._grammar is None or self._forced or self._reader.in_reasoning:
            return False
        return self._grammar.must_end

    @property
    def is_near_budget(self) -> bool:
        """Whether the reasoning would have to end after one more token."""
        budget = self._thinking.budget
        return budget is not None and self._num_reasoning + 1 >= budget

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must follow, as far as only one continuation is possible."""
        if self._forced or self._grammar is None or self._reader.in_reasoning or self._may_open:
            return self._forced.copy()
        return self._grammar.forced_tokens()

    def num_accepted(self, tokens: Sequence[int]) -> int:
        """Return how many first tokens of a draft are allowed. Changes nothing."""
        grammar = None if self._grammar is None else self._grammar.copy()
        trial = ReasoningState(self._thinking, grammar, self._bytes, self._vocab_size)
        for token in self._tokens:
            trial._follow(token, self._bytes(token))
        for count, token in enumerate(tokens):
            allowed = trial.mask()
            if allowed is not None and not allowed[token]:
                return count
            trial.advance(token)
        return len(tokens)

    def advance(self, token: int) -> None:
        """Append a token."""
        if self._follow(token, self._bytes(token)) and self._grammar is not None:
            self._grammar.advance(token)

    def _follow(self, token: int, piece: bytes) -> bool:
        """Append a token; return whether the grammar is to read it too."""
        was_forced, was_reasoning = bool(self._forced), self._reader.in_reasoning
        self._was_aside = self._reader.next_is_reasoning
        self._reader.push(token, piece.decode("utf-8", "replace"))
        if token in self._thinking.ends:
            self._reader.end_turn()
        is_reasoning = self._reader.in_reasoning
        if was_forced:
            self._forced = self._forced[1:] if token == self._forced[0] else []
        self._num_reasoning += was_reasoning and is_reasoning
        if was_reasoning and not is_reasoning and not was_forced and self._has_grammar:
            self._forced = [*self._tokens_to_grammar()]
        self._close_at_budget()
        self._tokens.append(token)
        self._is_for_grammar.append(not (was_forced or was_reasoning or is_reasoning))
        return self._is_for_grammar[-1]

    def _close_at_budget(self) -> None:
        thinking = self._thinking
        if thinking.budget is None or not self._reader.in_reasoning or self._forced:
            return
        if self._num_reasoning >= thinking.budget:
            format = thinking.format
            after = self._tokens_to_grammar() if self._has_grammar else format.after_close_ids
            self._forced = [*format.close_ids, *after]

    def rewind(self, count: int) -> None:
        """Drop the last `count` tokens."""
        length = len(self._tokens) - count
        if self._grammar is not None:
            self._grammar.rewind(sum(self._is_for_grammar[length:]))
        tokens = self._tokens[:length]
        self._reset()
        for token in tokens:  # read again: guards rewind seldom
            self._follow(token, self._bytes(token))
