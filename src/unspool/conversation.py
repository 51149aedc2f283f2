"""A conversation whose history is kept as token ids.

Decoding an answer to text and encoding it again can give other tokens than the model wrote. So the
history stays token ids, and each turn only appends what the template writes between one answer and
the next. The model computes only the new tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Unpack

from unspool.engine.generation import Generation
from unspool.engine.request import Options
from unspool.engine.request_builder import as_strings
from unspool.engine.results import Step, StepStream
from unspool.errors import UnspoolError
from unspool.session import Session


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and its answer."""

    question: str
    start: int  # number of ids before the question; -1: unknown
    answer: str
    reasoning: str


@dataclass(slots=True)
class Conversation:
    """Questions to one model and its answers; exchanges can be undone."""

    lm: Session
    system: str | None = None
    think: bool | str | None = None  # whether to reason before an answer, or the effort
    ids: list[int] = field(default_factory=list)
    reused: int = 0  # cached tokens of the last prompt
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """All messages. Reasoning is a field of its answer; the template decides what it shows."""
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        for exchange in self.exchanges:
            messages.append({"role": "user", "content": exchange.question})
            reasoning = {"reasoning_content": exchange.reasoning} if exchange.reasoning else {}
            messages.append({"role": "assistant", "content": exchange.answer, **reasoning})
        return messages

    def ask(self, question: str, **options: Unpack[Options]) -> tuple[Generation, Iterator[Step]]:
        """Ask a question; return the answer and its steps as they arrive."""
        start = len(self.ids)
        prompt = self._prompt(question, self.lm.think_options(self.think, options))
        options["stop"] = as_strings(options.get("stop")) + self.lm.chat_template.stops
        generation, steps = self.lm.begin(prompt, **options)
        return generation, self._record(question, start, prompt, generation, steps)

    def _record(
        self,
        question: str,
        start: int,
        prompt: list[int],
        generation: Generation,
        steps: StepStream,
    ) -> Iterator[Step]:
        try:
            yield from generation.extend(steps)
        finally:  # also when interrupted: the partial answer is part of the conversation
            self.reused = generation.reused
            self.ids = [*prompt, *generation.tokens]
            self.exchanges.append(
                Exchange(question, start, generation.answer, generation.reasoning)
            )

    def undo(self) -> str:
        """Drop the last question and its answer; return the question."""
        if not self.exchanges:
            raise UnspoolError("there is nothing to undo yet")
        if self.exchanges[-1].start < 0:
            raise UnspoolError("this turn was stored without its tokens; it cannot be undone")
        last = self.exchanges.pop()
        del self.ids[last.start :]
        return last.question

    def restart(self, system: str | None) -> None:
        """Start over with another system message."""
        self.system = system
        self.ids.clear()
        self.exchanges.clear()

    def _prompt(self, question: str, template_options: dict[str, Any]) -> list[int]:
        """Return the history, and what the template writes from there to the answer's start."""
        template = self.lm.chat_template
        messages = [*self.messages, {"role": "user", "content": question}]
        last = len(messages) - 2
        new_ids = None
        if self.exchanges:
            new_ids = template.encode_after(messages, last, **template_options)
        if new_ids is None:  # the first question, or a template that rewrites the history
            return template.encode(messages, **template_options).ids
        # The answer may have ended with the very token that the template writes after it.
        if self.ids[-1] in self.lm.end_ids and new_ids and new_ids[0] in self.lm.end_ids:
            new_ids = new_ids[1:]
        return [*self.ids, *new_ids]
