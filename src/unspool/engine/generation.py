"""A piece of writing that can be taken back, changed and gone on with.

    draft = lm.generate("The capital of Germany is", max_tokens=20)
    draft.alternatives(0)                          # what else could have come first
    fixed = draft.rewind(0).choose(" Bonn").resume()

Each verb gives a new `Generation` and leaves the old one as it was, so every version stays. What
two versions share is computed once: the engine finds it in its tree of tokens.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, Unpack

from unspool.engine.options import Options
from unspool.engine.request import Request
from unspool.engine.steps import Candidate, Step, Usage, brief
from unspool.engine.stream import StepStream
from unspool.errors import SettingsError, UnspoolError, check_int, count
from unspool.sampling.settings import SamplingSettings
from unspool.text.tokenizer.stream import TextStream


class Source(Protocol):
    """Who wrote a generation, and can go on with it: a language model."""

    def write_on(self, generation: Generation, **options: Unpack[Options]) -> StepStream:
        """The steps that follow what the generation holds."""

    def choices(
        self, tokens: Sequence[int], top: int, adapter: str | None = None
    ) -> tuple[Candidate, ...]:
        """The likeliest tokens behind these."""

    def chosen_steps(
        self,
        tokens: Sequence[int],
        chosen: str | int | Sequence[int],
        adapter: str | None = None,
    ) -> list[Step]:
        """Steps for tokens that a person puts behind these."""

    def explain(self, generation: Generation, top: int) -> list[Step]:
        """The steps of a generation, told in full."""


@dataclass(slots=True, repr=False)
class Generation:
    """A finished (or interrupted) piece of writing."""

    request: Request = field(repr=False)  # how it was asked for, to go on in that way
    steps: list[Step] = field(default_factory=list)
    empty_reason: str | None = None  # why its request wrote no token
    source: Source | None = field(default=None, repr=False)
    notes: list[str] = field(default_factory=list)  # what the engine had to say
    reused: int = 0  # tokens of the prompt that were computed before

    def extend(self, steps: StepStream) -> Iterator[Step]:
        """Take steps in as they come; those that a guard took back are taken out again."""
        for step in steps:
            self.reused = steps.prompt_reused
            self.take(step)
            yield step
        self.notes = list(steps.notes)

    async def extend_async(self, steps: StepStream) -> None:
        """Take in all steps without blocking the event loop; cancellation cancels the request."""
        async for step in steps:
            self.take(step)
        self.reused, self.notes = steps.prompt_reused, list(steps.notes)

    def take(self, step: Step) -> None:
        """Put one more step at the end, and take out those that it takes back."""
        if step.retracts:
            del self.steps[len(self.steps) - step.retracts :]
        self.steps.append(step)

    # -- taking words back -------------------------------------------------------------------

    def rewind(self, length: int) -> Generation:
        """The first `length` of the new tokens; negative: without so many of the last."""
        check_int("length", length, least=None)
        if not -len(self.steps) <= length <= len(self.steps):
            raise SettingsError(
                f"cannot rewind to {length}: {count(len(self.steps), 'token')} written"
            )
        kept = [
            step if step.finish_reason is None else replace(step, finish_reason=None)
            for step in self.steps[:length]
        ]
        return replace(self, steps=kept, notes=[], empty_reason=None)

    def fork(self) -> Generation:
        """The same text once more, to be gone on with in another way."""
        return self.rewind(len(self.steps))

    def choose(self, token: str | int | Sequence[int]) -> Generation:
        """Put a token (an id), several, or words of one's own at the end."""
        steps = self._writer().chosen_steps(
            [*self.prompt, *self.tokens], token, self.request.adapter
        )
        forked = self.fork()
        forked.steps = _retold(forked.steps + steps, TextStream(), ended=True)
        if self.request.thinking is not None:
            forked.steps = self.request.thinking.marked(forked.steps)
        return forked

    def resume(self, **options: Unpack[Options]) -> Generation:
        """Continue the text with the same options, or with others.

        `max_tokens` counts new tokens: `resume(max_tokens=4)` adds up to four. Without it the text
        may grow to the length that was allowed before, so `text.rewind(3).resume()` writes it
        again; a text that has that length gets as many new tokens as the last call allowed.
        """
        more, steps = self.going_on(**options)
        for _ in more.extend(steps):
            pass
        return more

    def going_on(self, **options: Unpack[Options]) -> tuple[Generation, StepStream]:
        """`resume`, with its steps still to come."""
        more = self.fork()
        steps = self._writer().write_on(more, **options)
        more.empty_reason = why_full(more.request, len(more.steps))
        # What was shown only because the text ended is held again.
        more.steps = _retold(more.steps, TextStream(more.request.limits.stop), ended=False)
        return more, steps

    def alternatives(self, index: int, top: int = 10) -> tuple[Candidate, ...]:
        """The likeliest tokens at one place: what could have stood there."""
        check_int("index", index, least=None)
        check_int("top", top)
        if not 0 <= index <= len(self.steps):
            raise SettingsError(f"there is no token {index}: {len(self.steps)} were written")
        tokens = [*self.prompt, *self.tokens[:index]]
        return self._writer().choices(tokens, top, self.request.adapter)

    def _writer(self) -> Source:
        if self.source is None:
            raise UnspoolError(
                "this generation has no model at hand, as after a pickle; give it one: "
                "lm.attach(generation)"
            )
        return self.source

    def explained(self, top: int = 5) -> Generation:
        """The same text with every step told in full, as `explain=True` would have: computed now,
        from the tree."""
        return replace(self, steps=self._writer().explain(self, top))

    # -- what it is --------------------------------------------------------------------------

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens that were there before."""
        return self.request.prompt

    @property
    def settings(self) -> SamplingSettings:
        """How its tokens were picked."""
        return self.request.settings

    @property
    def text(self) -> str:
        """The new text, without the prompt."""
        return "".join(step.text for step in self.steps)

    @property
    def reasoning(self) -> str:
        """What the model said to itself before it answered; in chats with models that do."""
        thinking = self.request.thinking
        return "" if thinking is None else thinking.told_apart(self.steps)[0]

    @property
    def answer(self) -> str:
        """The new text without thoughts and their marks."""
        thinking = self.request.thinking
        return self.text if thinking is None else thinking.told_apart(self.steps)[1]

    @property
    def tokens(self) -> list[int]:
        """The new tokens, an end token included."""
        return [step.token for step in self.steps]

    @property
    def finish_reason(self) -> str:
        """`stop` (end token or stop string), `length`, `context`, or `interrupted`."""
        if len(self.steps) <= len(self.request.written) and self.empty_reason:
            return self.empty_reason
        return (self.steps[-1].finish_reason if self.steps else None) or "interrupted"

    @property
    def logprob(self) -> float:
        """Log-probability of the new text by the model itself: the chain rule."""
        return math.fsum(step.logprob for step in self.steps)

    @property
    def seed(self) -> int:
        """What its draws follow from; the same seed writes it again."""
        return self.settings.seed

    @property
    def usage(self) -> Usage:
        """Tokens and time that it took."""
        return Usage(
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.steps),
            first_token_seconds=self.steps[0].seconds if self.steps else 0.0,
            total_seconds=sum(step.seconds for step in self.steps),
            reused_tokens=self.reused,
            reasoning_tokens=sum(step.thought for step in self.steps),
            reasoning_seconds=sum(step.seconds for step in self.steps if step.thought),
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON: everything but the single steps."""
        return {
            "text": self.text,
            **({"answer": self.answer, "reasoning": self.reasoning} if self.reasoning else {}),
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "logprob": self.logprob,
            "seed": self.seed,
            "usage": {**asdict(self.usage), "total_tokens": self.usage.total_tokens},
        }

    def __str__(self) -> str:
        return self.answer

    def __repr__(self) -> str:
        said = brief(self.answer) if self.text else reprlib.repr(self.tokens)
        return f"<Generation {said}, {count(len(self.steps), 'token')}, {self.finish_reason}>"

    def _repr_html_(self) -> str:
        from unspool.notebook import legend, note, picture, steps_table, text_html

        pieces = [step.as_piece() for step in self.steps]
        seconds = self.usage.total_seconds
        length = count(len(pieces), "token")
        facts = f"{length}, {self.finish_reason}, seed {self.seed}, {seconds:.2f} s"
        return picture(text_html(pieces), note(facts), legend(), steps_table(pieces))

    # -- copies ------------------------------------------------------------------------------

    def __copy__(self) -> Generation:
        return replace(self, steps=list(self.steps), notes=list(self.notes))

    def __deepcopy__(self, memo: dict[int, Any]) -> Generation:
        return self.__copy__()  # all else never changes, and the model is no part of the text

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle holds the text and how it was asked for; not the model, nor who drafted."""
        request = replace(self.request, drafter=None)
        return Generation, (request, self.steps, self.empty_reason, None, self.notes, self.reused)


class Generations(list[Generation]):
    """Several texts; a list that a notebook shows one below the other."""

    def __repr__(self) -> str:
        return f"<{len(self)} texts: {', '.join(brief(text.text, 24) for text in self)}>"

    def _repr_html_(self) -> str:
        return texts_html(self, [f"number {number}" for number in range(len(self))])


def texts_html(texts: Sequence[Generation], labels: Sequence[str]) -> str:
    """Several texts for a notebook, each below its label."""
    from unspool.notebook import legend, note, picture, text_html

    shown: list[str] = []
    for text, label in zip(texts, labels, strict=True):
        shown += [note(label), text_html([step.as_piece() for step in text.steps])]
    return picture(*shown, legend())


def check_generation(value: object) -> None:
    """Raise SettingsError unless the value is a `Generation`."""
    if not isinstance(value, Generation):
        raise SettingsError(
            f"generation must be what generate, chat or resume gave, got {reprlib.repr(value)}"
        )


def why_full(request: Request, num_written: int) -> str | None:
    """The finish reason of a request that allows no token behind `num_written` new ones."""
    if num_written < request.limits.room(len(request.prompt)):
        return None
    return "length" if num_written >= request.limits.max_tokens else "context"


def _retold(steps: list[Step], stream: TextStream, *, ended: bool) -> list[Step]:
    """Steps with the text that each makes certain, when so much is known of what may follow."""
    told = [(stream.half, stream.push(step.bytes)) for step in steps]
    if ended and told:
        told[-1] = (told[-1][0], told[-1][1] + stream.finish())
    return [
        step if (step.begun, step.text) == (begun, text) else replace(step, begun=begun, text=text)
        for step, (begun, text) in zip(steps, told, strict=True)
    ]
