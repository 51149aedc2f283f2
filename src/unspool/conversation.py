"""A conversation whose history stays token ids.

Turning an answer into text and back can give other tokens than the model wrote. So what was said
is kept as ids, and each turn only appends what the template writes between one answer and the
next. The model reads only what it has not read before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Unpack

from unspool.engine.generation import Generation
from unspool.engine.options import Options
from unspool.engine.steps import Step
from unspool.engine.stream import StepStream
from unspool.errors import UnspoolError
from unspool.request_options import strings
from unspool.session import Session


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One question and its answer, and where the ids stood before and after the question."""

    question: str
    before: int
    asked: int
    answer: str
    reasoning: str


@dataclass(slots=True)
class Conversation:
    """Questions and answers with one model; exchanges can be taken back."""

    lm: Session
    system: str | None = None
    think: bool | str | None = None  # whether to think before an answer, or with how much effort
    ids: list[int] = field(default_factory=list)
    reused: int = 0  # tokens of the last prompt that were not computed again
    _exchanges: list[_Exchange] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """What was said. Thoughts stand beside answers; the template decides which are told."""
        found = [{"role": "system", "content": self.system}] if self.system is not None else []
        for exchange in self._exchanges:
            found.append({"role": "user", "content": exchange.question})
            thought = {"reasoning_content": exchange.reasoning} if exchange.reasoning else {}
            found.append({"role": "assistant", "content": exchange.answer, **thought})
        return found

    def ask(self, question: str, **options: Unpack[Options]) -> tuple[Generation, Iterator[Step]]:
        """Ask, and get the answer's steps as they come; options as in `LanguageModel.stream`."""
        before = len(self.ids)
        prompt = self._prompt(question, self.lm.think_options(self.think, options))
        options["stop"] = strings(options.get("stop")) + self.lm.chat_template.stops
        generation, steps = self.lm.begin(prompt, **options)
        return generation, self._listen(question, before, prompt, generation, steps)

    def _listen(
        self,
        question: str,
        before: int,
        prompt: list[int],
        generation: Generation,
        steps: StepStream,
    ) -> Iterator[Step]:
        try:
            yield from generation.extend(steps)
        finally:  # also when interrupted: what was said so far is part of the conversation
            self.reused = generation.reused
            self.ids = [*prompt, *generation.tokens]
            said = generation.answer, generation.reasoning
            self._exchanges.append(_Exchange(question, before, len(prompt), *said))

    def undo(self) -> str:
        """Take the last question and its answer back; gives the question."""
        if not self._exchanges:
            raise UnspoolError("there is nothing to take back yet")
        last = self._exchanges.pop()
        del self.ids[last.before :]
        return last.question

    def restart(self, system: str | None) -> None:
        """Begin anew with another system message."""
        self.system = system
        self.ids.clear()
        self._exchanges.clear()

    def _prompt(self, question: str, told: dict[str, Any]) -> list[int]:
        """What was said so far, and what the template writes from there to the answer's start."""
        template = self.lm.chat_template
        messages = [*self.messages, {"role": "user", "content": question}]
        last = len(messages) - 2
        rest = template.encode_after(messages, last, **told) if self._exchanges else None
        if rest is None:  # the first question, or a template that rewrites what was said
            return template.encode(messages, **told).ids
        # The answer may have ended with the very token that the template writes after it.
        if self.ids[-1] in self.lm.end_ids and rest and rest[0] in self.lm.end_ids:
            rest = rest[1:]
        return [*self.ids, *rest]
