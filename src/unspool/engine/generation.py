"""A generated text that can be rewound, edited and resumed.

    draft = lm.generate("The capital of Germany is", max_tokens=20)
    draft.alternatives(0)                          # which tokens could have come first
    fixed = draft.rewind(0).choose(" Bonn").resume()

Each method returns a new `Generation` and does not change the old one, so every version stays. The
tokens that two versions share are computed once: the engine finds them in its prefix cache.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Unpack

from unspool.backends.interventions import BranchInterventions
from unspool.engine.request import Options, Request, insert_tokens
from unspool.engine.results import Candidate, Step, StepStream, Usage, brief
from unspool.errors import SettingsError, UnspoolError, check_int, count
from unspool.sampling.settings import SamplingSettings
from unspool.text.tokenizer.stream import TextStream


class GenerationModel(Protocol):
    """The model that wrote a generation and can continue it."""

    def continue_generation(self, generation: Generation, **options: Unpack[Options]) -> StepStream:
        """Continue a generation; return the stream of new steps."""

    def choices(
        self,
        tokens: Sequence[int],
        top: int,
        adapter: str | None = None,
        interventions: BranchInterventions | None = None,
    ) -> tuple[Candidate, ...]:
        """Return the most likely tokens after these."""

    def chosen_steps(
        self,
        tokens: Sequence[int],
        chosen: str | int | Sequence[int],
        adapter: str | None = None,
        interventions: BranchInterventions | None = None,
    ) -> list[Step]:
        """Return steps for tokens that a person appends to these."""

    def save_generation(self, generation: Generation, path: str | Path) -> None:
        """Write a generation to a file."""

    def explain(self, generation: Generation, top: int) -> list[Step]:
        """Return the steps of a generation with all details of the sampling."""

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes in a text."""


@dataclass(slots=True, repr=False)
class Generation:
    """A generated text, complete or interrupted."""

    request: Request = field(repr=False)  # as submitted; `resume` continues with it
    steps: list[Step] = field(default_factory=list)  # one for each new token
    empty_reason: str | None = None  # finish reason of a request that allows no token
    source: GenerationModel | None = field(default=None, repr=False)  # its model; None: unpickled
    notes: list[str] = field(default_factory=list)  # remarks of the engine
    reused: int = 0  # tokens of the prompt that were cached

    def extend(self, steps: StepStream) -> Iterator[Step]:
        """Append steps as they arrive, and yield them; steps that a guard retracts are removed."""
        for step in steps:
            self.reused = steps.prompt_reused
            self.append_step(step)
            yield step
        self.notes = list(steps.notes)

    def extend_to_end(self, steps: StepStream) -> None:
        """Append all steps of a text that has ended."""
        has_more = True
        while has_more:
            arrived, ended = steps.read_available()
            for step in arrived:
                self.append_step(step)
            has_more = not ended
        self.reused, self.notes = steps.prompt_reused, list(steps.notes)

    async def extend_async(self, steps: StepStream) -> None:
        """Append all steps without blocking the event loop; cancelling it cancels the request."""
        async for step in steps:
            self.append_step(step)
        self.reused, self.notes = steps.prompt_reused, list(steps.notes)

    def append_step(self, step: Step) -> None:
        """Append a step, and remove those that it retracts."""
        if step.retracts:
            del self.steps[len(self.steps) - step.retracts :]
        self.steps.append(step)

    def rewind(self, length: int) -> Generation:
        """Keep the first `length` of the new tokens; a negative number drops that many."""
        check_int("length", length, least=None)
        if not -len(self.steps) <= length <= len(self.steps):
            raise SettingsError(
                f"cannot rewind to {length}: {count(len(self.steps), 'token')} written"
            )
        steps = [
            step if step.finish_reason is None else replace(step, finish_reason=None)
            for step in self.steps[:length]
        ]
        return replace(self, steps=steps, notes=[], empty_reason=None)

    def fork(self) -> Generation:
        """Return a copy of the text, to continue it in another way."""
        return self.rewind(len(self.steps))

    def choose(self, token: str | int | Sequence[int]) -> Generation:
        """Append a token id, several, or text of your own."""
        request = self.request
        steps = self._writer().chosen_steps(
            self.context_tokens(), token, request.adapter, request.branch_interventions()
        )
        shift = request.num_inserted
        steps = [replace(step, position=step.position - shift) for step in steps]
        forked = self.fork()
        forked.steps = _redecode(forked.steps + steps, TextStream(), is_complete=True)
        if self.request.thinking is not None:
            forked.steps = self.request.thinking.mark_steps(forked.steps)
        return forked

    def edited(
        self,
        changes: Sequence[tuple[int, int, Sequence[int]]],
        *,
        prompt: Sequence[int] | None = None,
    ) -> Generation:
        """Replace ranges of the new tokens, and optionally the prompt; what follows is kept.

        Each change is (first, last, tokens): tokens instead of the steps from `first` to before
        `last`, in ascending order and without overlap. Steps before the first change stay as they
        are. All others have no score (see `Step.is_scored`) until `rescored` computes it.
        """
        writer, steps, at = self._writer(), list[Step](), 0
        ids = self.prompt if prompt is None else tuple(prompt)
        num_scored = len(self.steps) if prompt is None else 0
        if changes:
            num_scored = min(num_scored, changes[0][0])
        for first, last, tokens in (*changes, (len(self.steps), len(self.steps), ())):
            steps += self.steps[at:first]
            steps += [
                Step(token, writer.token_bytes(token), "", math.nan, 0, chosen=True)
                for token in tokens
            ]
            at = last
        kept = self.rewind(num_scored)
        unscored = [
            replace(
                step, position=position, logprob=math.nan, finish_reason=None, rank=None,
                entropy=None, probability=None, draw=None, candidates=(), stages=(), draft=None,
                retracts=0,
            )
            for position, step in enumerate(steps[num_scored:], len(ids) + num_scored)
        ]  # fmt: skip
        kept.steps = _redecode(kept.steps + unscored, TextStream(), is_complete=True)
        if prompt is not None:
            kept.request = replace(self.request, prompt=ids)
        if self.request.thinking is not None:
            kept.steps = self.request.thinking.mark_steps(kept.steps)
        return kept

    def rescored(self, first: int, last: int) -> list[Step]:
        """Return the steps from `first` to before `last` with the model's scores, or to the next
        place where the model reads something that is not in the text."""
        starts = (insert.at - len(self.prompt) for insert in self.request.inserts)
        last = min([last, *(at for at in starts if at > first)])
        part = self.steps[first:last]
        if not part:
            return []
        before = self.context_tokens(first)
        tokens = [step.token for step in part]
        interventions = self.request.branch_interventions()
        scores = self._writer().chosen_steps(before, tokens, self.request.adapter, interventions)
        return [
            replace(step, logprob=score.logprob, rank=score.rank, entropy=score.entropy)
            for step, score in zip(part, scores, strict=True)
        ]

    def resume(self, **options: Unpack[Options]) -> Generation:
        """Continue the text with the same options, or with others.

        `max_tokens` counts new tokens: `resume(max_tokens=4)` adds up to four. Without it the text
        may grow to the length that was allowed before, so `text.rewind(3).resume()` writes it
        again; a text that has that length gets as many new tokens as the last call allowed.
        """
        continued, steps = self.start_resume(**options)
        for _ in continued.extend(steps):
            pass
        return continued

    def start_resume(self, **options: Unpack[Options]) -> tuple[Generation, StepStream]:
        """Start `resume`; return the generation and the stream of its new steps."""
        continued = self.fork()
        steps = self._writer().continue_generation(continued, **options)
        continued.empty_reason = why_full(continued.request, len(continued.steps))
        # Text that was shown only because the generation ended is held back again.
        stream = TextStream(continued.request.limits.stop)
        continued.steps = _redecode(continued.steps, stream, is_complete=False)
        return continued, steps

    def save(self, path: str | Path) -> None:
        """Write the text and everything that led to it to a file (a trace: plain JSON).

        `lm.open(path)` reads it, to continue the text; `lm.replay(path)` generates it again.
        """
        self._writer().save_generation(self, path)

    def alternatives(self, index: int, top: int = 10) -> tuple[Candidate, ...]:
        """Return the most likely tokens at the position of a new token."""
        check_int("index", index, least=None)
        check_int("top", top)
        if not 0 <= index <= len(self.steps):
            raise SettingsError(f"index must be from 0 to {len(self.steps)}, got {index}")
        tokens = self.context_tokens(index)
        request = self.request
        return self._writer().choices(tokens, top, request.adapter, request.branch_interventions())

    def context_tokens(self, length: int | None = None) -> list[int]:
        """Return what the model reads before the new token `length`, by default after all."""
        tokens = [*self.prompt, *(step.token for step in self.steps[:length])]
        return insert_tokens(tokens, self.request.inserts)

    def _writer(self) -> GenerationModel:
        if self.source is None:
            raise UnspoolError(
                "this generation has no model, as after unpickling; attach one: "
                "lm.attach(generation)"
            )
        return self.source

    def explained(self, top: int = 5) -> Generation:
        """Return the same text with all details of the sampling, as from `explain=True`."""
        return replace(self, steps=self._writer().explain(self, top))

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens of the prompt."""
        return self.request.prompt

    @property
    def settings(self) -> SamplingSettings:
        """The sampling settings."""
        return self.request.settings

    @property
    def text(self) -> str:
        """The new text, without the prompt."""
        return "".join(step.text for step in self.steps)

    @property
    def reasoning(self) -> str:
        """The reasoning before the answer, without tags; empty if the model does not reason."""
        thinking = self.request.thinking
        return "" if thinking is None else thinking.split(self.steps)[0]

    @property
    def answer(self) -> str:
        """The new text without the reasoning."""
        thinking = self.request.thinking
        return self.text if thinking is None else thinking.split(self.steps)[1]

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
        """Log-probability of the new text by the model itself, before any sampling stage."""
        return math.fsum(step.logprob for step in self.steps)

    @property
    def seed(self) -> int:
        """The seed of its random numbers; the same seed writes the same text."""
        return self.settings.seed

    @property
    def usage(self) -> Usage:
        """Tokens and time."""
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
        """Return everything but the single steps, for JSON."""
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
        text = brief(self.answer) if self.text else reprlib.repr(self.tokens)
        return f"<Generation {text}, {count(len(self.steps), 'token')}, {self.finish_reason}>"

    def _repr_html_(self) -> str:
        from unspool.notebook import legend_html, note_html, notebook_html, steps_table, text_html

        pieces = [step.as_piece() for step in self.steps]
        seconds = self.usage.total_seconds
        length = count(len(pieces), "token")
        facts = f"{length}, {self.finish_reason}, seed {self.seed}, {seconds:.2f} s"
        return notebook_html(
            text_html(pieces), note_html(facts), legend_html(), steps_table(pieces)
        )

    def __copy__(self) -> Generation:
        return replace(self, steps=list(self.steps), notes=list(self.notes))

    def __deepcopy__(self, memo: dict[int, Any]) -> Generation:
        return self.__copy__()  # everything else is immutable, and the model is shared

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the text and its request, without the model and the drafter."""
        request = replace(self.request, drafter=None)
        return Generation, (request, self.steps, self.empty_reason, None, self.notes, self.reused)


class Generations(list[Generation]):
    """A list of generations, with a notebook view."""

    def __repr__(self) -> str:
        return f"<{len(self)} texts: {', '.join(brief(text.text, 24) for text in self)}>"

    def _repr_html_(self) -> str:
        return texts_html(self, [f"number {number}" for number in range(len(self))])


def texts_html(texts: Sequence[Generation], labels: Sequence[str]) -> str:
    """Return several texts as HTML for a notebook, each below its label."""
    from unspool.notebook import legend_html, note_html, notebook_html, text_html

    parts: list[str] = []
    for text, label in zip(texts, labels, strict=True):
        parts += [note_html(label), text_html([step.as_piece() for step in text.steps])]
    return notebook_html(*parts, legend_html())


def check_generation(value: object) -> None:
    """Raise SettingsError unless the value is a `Generation`."""
    if not isinstance(value, Generation):
        raise SettingsError(
            f"generation must be a result of generate, chat or resume, got {reprlib.repr(value)}"
        )


def why_full(request: Request, num_written: int) -> str | None:
    """Return the finish reason if a request allows no token after `num_written`; else None."""
    if num_written < request.visible_limits.room(len(request.prompt)):
        return None
    return "length" if num_written >= request.limits.max_tokens else "context"


def _redecode(steps: list[Step], stream: TextStream, *, is_complete: bool) -> list[Step]:
    """Decode the bytes of the steps again, with the stop strings of another stream."""
    decoded = [(stream.partial_utf8, stream.push(step.bytes)) for step in steps]
    if is_complete and decoded:
        partial, text = decoded[-1]
        decoded[-1] = (partial, text + stream.finish())
    return [
        step
        if (step.partial_utf8, step.text) == (partial, text)
        else replace(step, partial_utf8=partial, text=text)
        for step, (partial, text) in zip(steps, decoded, strict=True)
    ]
