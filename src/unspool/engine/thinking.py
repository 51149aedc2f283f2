"""A text in which the model thinks before it answers: where its thoughts are, how long they may be,
and that a grammar is about the answer alone.

`ThinkingState` follows the text token by token and stands where a `GrammarState` would: it says
what may come next, and takes what came. Inside a thought everything may come, until the budget is
used up; then only the tokens that close it, which the model's own template writes there. Behind the
thought the grammar begins, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from unspool.errors import SettingsError
from unspool.text.thoughts.channels import ChannelReader
from unspool.text.thoughts.formats import CHANNEL, Start, ThoughtFormat, tail_of
from unspool.text.thoughts.reader import answer_reader, told_apart
from unspool.text.thoughts.tags import TagReader

if TYPE_CHECKING:
    from unspool.engine.steps import Step
    from unspool.sampling import GrammarState
    from unspool.sampling.grammar import Mask

CALL = "call"  # as the option `thoughts`: the grammar is that of a call of a function


@dataclass(frozen=True, slots=True)
class Thinking:
    """That a text is an answer with thoughts, and what is known of it before it is written."""

    format: ThoughtFormat
    start: Start
    budget: int | None = None  # tokens of thought, at the most
    is_call: bool = False  # the grammar is that of a call, which says its own channel
    ends: frozenset[int] = frozenset()  # tokens that end a turn; what follows is another one

    def told_apart(self, steps: Sequence[Step]) -> tuple[str, str]:
        """The thought and the answer in a text that is there."""
        written = [(step.token, step.text) for step in steps]
        reader = answer_reader(self.format, self.start, None)
        assert reader is not None
        found = told_apart(reader, written)
        if not reader.is_stray:
            return found
        return replace(self, start=Start("inside")).told_apart(steps)

    def marked(self, steps: Sequence[Step]) -> list[Step]:
        """The steps, each saying whether it is thought: also those that a person put there."""
        state = ThinkingState(self, None, lambda token: b"", 0)
        found: list[Step] = []
        for step in steps:
            state._follow(step.token, step.bytes)
            is_thought = state.is_thought
            found.append(step if step.thought == is_thought else replace(step, thought=is_thought))
        return found


def thinking_of(
    format: ThoughtFormat,
    prompt: Sequence[int],
    token_text: Callable[[int], str],
    ends: frozenset[int],
) -> Thinking:
    """What is known of the answer to a prompt."""
    text = "".join(token_text(token) for token in tail_of(prompt))
    return Thinking(format, format.start(prompt, text), ends=ends)


def think_options(
    format: ThoughtFormat | None, think: bool | str | None, options: dict[str, Any]
) -> dict[str, Any]:
    """See `Session.think_options`."""
    budget = options.get("think_budget")
    if format is None:
        if think not in (None, False, "none") or budget:
            raise SettingsError(
                "this model does not think before it answers: neither its chat template nor its "
                "vocabulary knows of thoughts; leave out what asks for thoughts"
            )
        options.pop("think_budget", None)
        return {}
    told, options["think_budget"] = format.asked(think, budget)
    options["thoughts"] = options.get("thoughts") or True
    return told


class ThinkingState:
    """Where one text stands; not to be used by two threads at once."""

    __slots__ = (
        "_bytes",
        "_count",
        "_forced",
        "_has_grammar",
        "_inner",
        "_reader",
        "_size",
        "_thinking",
        "_tokens",
        "_told",
        "_was_aside",
    )  # fmt: skip

    def __init__(
        self,
        thinking: Thinking,
        inner: GrammarState | None,
        token_bytes: Callable[[int], bytes],
        vocab_size: int,
    ) -> None:
        self._thinking, self._inner, self._bytes = thinking, inner, token_bytes
        self._has_grammar, self._size = inner is not None, vocab_size
        self._begin()

    def _begin(self) -> None:
        thinking, format = self._thinking, self._thinking.format
        self._reader: TagReader | ChannelReader
        if format.channels:
            self._reader = ChannelReader(format, thinking.start, calls_count=True)
        else:
            self._reader = TagReader(format, thinking.start)
        self._tokens: list[int] = []
        self._told: list[bool] = []  # of the tokens: whether they are for the grammar
        self._count = 0  # tokens of thought
        self._was_aside = False
        self._forced: list[int] = []
        if format.channels and self._has_grammar and thinking.start.place == "before":
            begins = format.behind_ids.index(format.ids[CHANNEL])  # the prompt has what is before
            answer = [] if thinking.is_call else [*format.behind_ids[begins:]]
            self._forced = answer if thinking.budget == 0 else [*format.opening_ids]
        self._close_at_budget()

    def _to_grammar(self) -> Sequence[int]:
        """What leads from a thought to what the grammar is about."""
        behind, ids = self._thinking.format.behind_ids, self._thinking.format.ids
        if self._thinking.is_call and self._thinking.format.channels:
            return behind[: behind.index(ids[CHANNEL])]  # a call says its own channel
        return behind

    @property
    def is_thought(self) -> bool:
        """Whether the last token is no part of the answer: a thought, or its marks."""
        return self._was_aside or self._reader.is_aside

    # -- what may come, as a grammar says it ---------------------------------------------------

    def mask(self) -> Mask | None:
        """Which tokens may come next; None: all."""
        if self._forced:
            only = np.zeros(self._size, bool)
            only[self._forced[0]] = True
            return only
        if self._inner is None or self._reader.in_thought:
            return None
        allowed = self._inner.mask()
        if self._may_open:
            allowed = allowed.copy()
            allowed[self._thinking.format.ids[self._thinking.format.open]] = True
        return allowed

    @property
    def _may_open(self) -> bool:
        """Whether a thought may begin where the grammar would."""
        thinking = self._thinking
        is_first = not self._tokens and thinking.start.place == "before" and thinking.budget != 0
        return (
            is_first
            and not thinking.format.channels
            and thinking.format.open in (thinking.format.ids)
        )

    @property
    def must_end(self) -> bool:
        """Whether the text can only end here."""
        free = self._inner is None or bool(self._forced) or self._reader.in_thought
        return not free and self._inner is not None and self._inner.must_end

    @property
    def is_near_budget(self) -> bool:
        """Whether a thought would have to be closed behind one more token."""
        budget = self._thinking.budget
        return budget is not None and self._count + 1 >= budget

    def forced(self) -> list[int]:
        """Where only one text can follow: that text."""
        if self._forced or self._inner is None or self._reader.in_thought or self._may_open:
            return self._forced.copy()
        return self._inner.forced()

    def accepts(self, tokens: Sequence[int]) -> int:
        """How many of a draft's tokens, from the first on, could be taken. Changes nothing."""
        inner = None if self._inner is None else self._inner.copy()
        trial = ThinkingState(self._thinking, inner, self._bytes, self._size)
        for token in self._tokens:
            trial._follow(token, self._bytes(token))
        for count, token in enumerate(tokens):
            allowed = trial.mask()
            if allowed is not None and not allowed[token]:
                return count
            trial.advance(token)
        return len(tokens)

    # -- what came -----------------------------------------------------------------------------

    def advance(self, token: int) -> None:
        """Take a token."""
        if self._follow(token, self._bytes(token)) and self._inner is not None:
            self._inner.advance(token)

    def _follow(self, token: int, piece: bytes) -> bool:
        """Take a token; True if the grammar is to take it, too."""
        was_forced, before = bool(self._forced), self._reader.in_thought
        self._was_aside = self._reader.is_inside
        self._reader.push(token, piece.decode("utf-8", "replace"))
        if token in self._thinking.ends:
            self._reader.end_turn()
        after = self._reader.in_thought
        if was_forced:
            self._forced = self._forced[1:] if token == self._forced[0] else []
        self._count += before and after
        if before and not after and not was_forced and self._has_grammar:
            self._forced = [*self._to_grammar()]
        self._close_at_budget()
        self._tokens.append(token)
        self._told.append(not (was_forced or before or after))
        return self._told[-1]

    def _close_at_budget(self) -> None:
        thinking = self._thinking
        if thinking.budget is None or not self._reader.in_thought or self._forced:
            return
        if self._count >= thinking.budget:
            behind = self._to_grammar() if self._has_grammar else thinking.format.behind_ids
            self._forced = [*thinking.format.close_ids, *behind]

    def rewind(self, count: int) -> None:
        """Take the last `count` tokens back."""
        kept = len(self._tokens) - count
        if self._inner is not None:
            self._inner.rewind(sum(self._told[kept:]))
        tokens = self._tokens[:kept]
        self._begin()
        for token in tokens:  # read anew: guards seldom go back
            self._follow(token, self._bytes(token))
