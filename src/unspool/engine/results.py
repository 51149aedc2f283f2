"""Results of the engine: steps (one per token), scores of given text, and the stream of steps."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from unspool.engine.work_scope import current_scope
from unspool.errors import UnspoolError, count
from unspool.sampling.chain import Draw, Pick, StageReport
from unspool.text.tokenizer.pieces import readable

if TYPE_CHECKING:
    from unspool.notebook import NotebookToken


# -- Steps (one for each generated token, with how it was sampled), and scores of given text

_Bytes = bytes  # inside `Step`, where the field `bytes` hides the type


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that could have been sampled at one position."""

    token: int  # its id
    text: str  # in readable form
    logprob: float  # by the model itself
    probability: float  # in the distribution sampled from; 0 if a stage removed it


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token, and how it was sampled.

    `text` is the text that this token made certain: it may complete a character of earlier tokens,
    and is empty while a character or a possible stop string is incomplete. The texts of all steps,
    joined, are the text of the generation. `bytes` are this token's own.

    Rank, entropy, probability and draw are None unless requested by `explain=True` or `top`;
    `Generation.explained()` computes them afterwards.
    """

    token: int  # its id
    bytes: bytes  # that the token adds to the text
    text: str  # that this token made certain
    logprob: float  # of this token, by the model itself, before any sampling stage
    position: int  # in the whole text, prompt included
    seconds: float = 0.0  # since the step before (or the start)
    finish_reason: str | None = None  # on the last step
    rank: int | None = None  # 0: the most likely token
    entropy: float | None = None  # of the model's distribution, in nats
    probability: float | None = None  # of this token in the distribution sampled from
    draw: Draw | None = None  # the random number and the interval it fell in; None if greedy
    candidates: tuple[Candidate, ...] = ()  # the most likely tokens, `top` of them
    stages: tuple[StageReport, ...] = ()  # what each sampling stage did, with `explain`
    draft: str | None = None  # `accepted` or `rejected`, where a draft proposed a token
    retracts: int = 0  # how many steps before this one a guard removed
    chosen: bool = False  # by a person, not by the model
    # Whether it belongs to the reasoning (tags included). Follows from the tokens.
    thought: bool = field(default=False, compare=False)
    # The canvas pass that set it. None: generated left to right, as everything that traces save.
    canvas_pass: int | None = field(default=None, compare=False)
    # The incomplete UTF-8 character before this token. Follows from earlier tokens; not saved.
    partial_utf8: _Bytes = field(default=b"", compare=False)

    @property
    def piece(self) -> str:
        """The token in readable form: with the whole character that it completes; bytes that are
        no character are in ⟨⟩."""
        return readable(self.bytes, self.partial_utf8)

    def __repr__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}"
        return f"<Step {self.piece!r} ({self.token}), p {math.exp(self.logprob):.3g}{rank}>"

    def as_piece(self) -> NotebookToken:
        """Return the step as a notebook shows it."""
        from unspool.notebook import NotebookToken, percent

        facts = [f"token {self.token}, probability {percent(math.exp(self.logprob))}"]
        if self.rank is not None and self.entropy is not None:
            facts.append(f"rank {self.rank + 1}, entropy {self.entropy:.2f} nats")
        if self.draw is not None:
            draw = self.draw
            facts.append(f"random number {draw.u:.4f} in [{draw.low:.4f}, {draw.high:.4f})")
        if self.chosen:
            facts.append("chosen by a person")
        if self.candidates:
            facts.append("candidates: " + ", ".join(map(_describe, self.candidates)))
        probability = math.exp(self.logprob)
        # A control token has no text, and a part of a character has none yet.
        display_text = self.text or ("" if self.bytes else f"⟨{self.token}⟩")
        return NotebookToken(self.piece, probability, facts, display_text)

    def _repr_html_(self) -> str:
        from unspool.notebook import note_html, notebook_html, text_html

        piece = self.as_piece()
        return notebook_html(
            text_html([replace(piece, display_text=None if self.bytes else piece.display_text)]),
            *map(note_html, piece.facts),
        )

    @property
    def is_scored(self) -> bool:
        """Whether it has a log-probability: after an edit, the steps that follow have none yet."""
        return not math.isnan(self.logprob)

    @property
    def explained(self) -> bool:
        """Whether the step has more than its token and log-probability."""
        return self.rank is not None

    def to_dict(self) -> dict[str, Any]:
        """For JSON; bytes as a list of numbers."""
        data = {**asdict(self), "bytes": list(self.bytes)}
        del data["partial_utf8"]  # the bytes of earlier steps have it
        if self.canvas_pass is None:
            del data["canvas_pass"]
        if not self.thought:
            del data["thought"]
        return data


# A frozen dataclass sets each field through `object.__setattr__`: 4.9 µs for a step. One with the
# same slots that is not frozen is filled in `plain_step`, and then becomes a `Step`.
_MutableStep = make_dataclass("_MutableStep", [(f.name, Any) for f in fields(Step)], slots=True)
_new_object = object.__new__


# Takes an object out of the lists of Python's garbage collector; its references still count. A text
# keeps its steps, and every 25,000 of them the collector would visit all objects of the process:
# with torch that takes 0.1 s, and a quarter of the time of 256 texts on a GPU. A plain step refers
# to numbers, bytes and text only, so it cannot be part of a cycle.
_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.argtypes, _untrack.restype = (ctypes.py_object,), None


def plain_step(
    token: int, piece: _Bytes, text: str, logprob: float, position: int, seconds: float,
    finish_reason: str | None, draft: str | None, partial: _Bytes, is_reasoning: bool = False,
) -> Step:  # fmt: skip
    """Create a step without details of the sampling.

    Called for every token of every text, so it is written out: 0.9 µs instead of 1.5 with the
    arguments of a dataclass (timeit, a slow core).
    """
    step: Any = _new_object(_MutableStep)
    step.token, step.bytes, step.text, step.logprob = token, piece, text, logprob
    step.position, step.seconds, step.finish_reason = position, seconds, finish_reason
    step.rank = step.entropy = step.probability = step.draw = step.canvas_pass = None
    step.candidates = step.stages = ()
    step.draft, step.partial_utf8, step.thought = draft, partial, is_reasoning
    step.retracts, step.chosen = 0, False
    step.__class__ = Step
    _untrack(step)
    return cast(Step, step)


def explained_step(
    pick: Pick,
    position: int,
    text: str,
    token_bytes: Callable[[int], bytes],
    seconds: float,
    finish_reason: str | None,
    draft: str | None = None,
    retracts: int = 0,
    *,
    partial_utf8: _Bytes = b"",
    is_reasoning: bool = False,
) -> Step:
    """Create a step with all details of the sampling."""
    return Step(
        pick.token,
        token_bytes(pick.token),
        text,
        pick.logprob,
        position,
        seconds,
        finish_reason,
        pick.rank,
        pick.entropy,
        pick.probability,
        pick.draw,
        tuple(
            Candidate(
                c.token, readable(token_bytes(c.token), partial_utf8), c.logprob, c.probability
            )
            for c in pick.candidates
        ),
        pick.stages,
        draft,
        retracts,
        partial_utf8=partial_utf8,
        thought=is_reasoning,
    )


def _describe(candidate: Candidate) -> str:
    from unspool.notebook import percent

    return f"{candidate.text!r} {percent(math.exp(candidate.logprob))}"


def brief(text: str, max_length: int = 48) -> str:
    """Return a text in quotes on one line, cut if it is long."""
    return repr(text if len(text) <= max_length else text[: max_length - 1] + "…")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and time of a generation."""

    prompt_tokens: int  # cached ones included
    completion_tokens: int  # new ones, an end token included
    first_token_seconds: float  # time to first token (TTFT)
    total_seconds: float  # from the request to the last token
    reused_tokens: int = 0  # of the prompt, from the prefix cache
    reasoning_tokens: int = 0  # of the new ones, with the tags
    reasoning_seconds: float = 0.0  # time of the reasoning tokens

    @property
    def total_tokens(self) -> int:
        """Prompt and new tokens."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def tokens_per_second(self) -> float:
        """Decode speed, without the first token, which also waits for the prompt."""
        seconds = self.total_seconds - self.first_token_seconds
        return (self.completion_tokens - 1) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TokenScore:
    """How well the model predicts one token of a given text."""

    token: int  # its id
    text: str  # in readable form
    logprob: float | None  # None for a first token with nothing before it
    rank: int | None  # 0: the most likely token
    entropy: float | None  # of the model's distribution, in nats
    candidates: tuple[Candidate, ...] = ()  # the most likely tokens, `top` of them

    def __repr__(self) -> str:
        score = ""
        if self.logprob is not None:
            score = f", p {math.exp(self.logprob):.3g}, rank {self.rank}"
        return f"<TokenScore {self.text!r} ({self.token}){score}>"

    def as_piece(self) -> NotebookToken:
        """Return the token as a notebook shows it."""
        from unspool.notebook import NotebookToken, percent

        facts, display_text = [f"token {self.token}"], self.text or f"⟨{self.token}⟩"
        if self.logprob is None or self.rank is None or self.entropy is None:
            return NotebookToken(self.text, None, [*facts, "nothing before it"], display_text)
        facts.append(f"probability {percent(math.exp(self.logprob))}, rank {self.rank + 1}")
        facts.append(f"entropy {self.entropy:.2f} nats")
        if self.candidates:
            facts.append("candidates: " + ", ".join(map(_describe, self.candidates)))
        return NotebookToken(self.text, math.exp(self.logprob), facts, display_text)


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities of a given text, token by token."""

    positions: Sequence[TokenScore]  # one for each token

    @property
    def tokens(self) -> list[int]:
        """The token ids of the text."""
        return [position.token for position in self.positions]

    @property
    def logprobs(self) -> list[float | None]:
        """Of each token given those before it; None for a first token with nothing before it."""
        return [position.logprob for position in self.positions]

    @property
    def total(self) -> float:
        """Log-probability of the text."""
        return math.fsum(self._defined_logprobs)

    def __repr__(self) -> str:
        text = brief("".join(position.text for position in self.positions))
        return f"<Score {text}, {count(len(self.positions), 'token')}, {self.describe()}>"

    def describe(self) -> str:
        """Return log-probability and perplexity as text."""
        if not self._defined_logprobs:
            return "nothing to score: the first token has nothing before it"
        return f"log-probability {self.total:.3f}, perplexity {self.perplexity:.3f}"

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability; nan if no token has one."""
        logprobs = self._defined_logprobs
        return math.exp(-math.fsum(logprobs) / len(logprobs)) if logprobs else math.nan

    def _repr_html_(self) -> str:
        from unspool.notebook import legend_html, note_html, notebook_html, steps_table, text_html

        pieces = [position.as_piece() for position in self.positions]
        return notebook_html(
            text_html(pieces), note_html(self.describe()), legend_html(), steps_table(pieces)
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        positions = [asdict(position) for position in self.positions]
        perplexity = self.perplexity if self._defined_logprobs else None  # JSON has no nan
        return {"total": self.total, "perplexity": perplexity, "positions": positions}

    @property
    def _defined_logprobs(self) -> list[float]:
        return [logprob for logprob in self.logprobs if logprob is not None]


# -- The stream of steps from the engine's thread to the reader of a generation

_ALIVE_CHECK_S = 1.0  # how often a waiting reader checks that the engine is alive


class StepQueue:
    """The engine's end of a stream: takes steps, progress, notes and the end."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque()
        self.changed = threading.Condition()
        self.readers = 0  # waiting for a change
        self.ended = False
        self.error: BaseException | None = None
        self.listeners: list[Callable[[], object]] = []
        self.prompt_reused = 0  # tokens of the prompt that were cached
        self.prompt_computed: int | None = None  # tokens of it that are computed; None: not started
        self.watches_prompt = False  # whether listeners are called for prompt progress too
        self.notes: list[str] = []  # remarks of the engine, such as that drafting was stopped
        self.stopped_by: str | None = None  # the stop string that ended the text
        self.drafted = self.accepted = 0  # draft tokens proposed, and accepted
        self.on_start: Callable[[], object] | None = None  # called at the first step, or the end

    def add(self, step: Step) -> None:
        self.steps.append(step)
        if self.readers or self.listeners or self.on_start is not None:
            self._notify()

    def end(self, error: BaseException | None = None) -> None:
        if not self.ended:
            self.error = error
            self.ended = True  # set last: a reader that sees it finds everything else
            self._notify()

    def report_prompt(self, computed: int) -> None:
        """Report how many tokens of the prompt are computed."""
        self.prompt_computed = computed
        if self.watches_prompt:
            self._call_listeners()

    def _notify(self) -> None:
        """Wake readers and listeners.

        Without any, no lock is taken before the end: a reader registers first, and then checks for
        new steps.
        """
        if self.readers or self.ended or self.on_start is not None:
            with self.changed:
                if self.on_start is not None:
                    self.on_start()
                    self.on_start = None
                self.changed.notify_all()
        self._call_listeners()

    def _call_listeners(self) -> None:
        for listener in tuple(self.listeners):
            try:
                listener()
            except Exception:  # its event loop may be closed: remove the listener
                with self.changed, contextlib.suppress(ValueError):  # it may be removed already
                    self.listeners.remove(listener)


class StepStream(Iterator[Step]):
    """Iterate, or iterate asynchronously, over the steps of one generation."""

    def __init__(
        self,
        queue: StepQueue,
        cancel: Callable[[], object] = lambda: None,
        check_alive: Callable[[], object] = lambda: None,
        check_caller: Callable[[], object] = lambda: None,
    ) -> None:
        self._queue, self._cancel, self._check_alive = queue, cancel, check_alive
        self._check_caller = check_caller  # raises on the engine's thread, which must not wait

    @property
    def prompt_reused(self) -> int:
        """Tokens of the prompt that were cached."""
        return self._queue.prompt_reused

    @property
    def prompt_computed(self) -> int | None:
        """Tokens of the prompt that are computed so far; None: it has not started."""
        return self._queue.prompt_computed

    def watch_prompt(self) -> None:
        """Call listeners for progress on the prompt too."""
        self._queue.watches_prompt = True

    @property
    def notes(self) -> list[str]:
        """Remarks of the engine, such as that drafting was stopped."""
        return self._queue.notes

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self._queue.stopped_by

    @property
    def drafted(self) -> int:
        """Draft tokens that were proposed."""
        return self._queue.drafted

    @property
    def accepted(self) -> int:
        """Draft tokens that were accepted."""
        return self._queue.accepted

    @property
    def ended(self) -> bool:
        """Whether no more steps will arrive than those not read yet."""
        return self._queue.ended

    # -- reading step by step ----------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        """Iterate over the steps; leaving the loop cancels the generation."""
        steps = self._queue.steps
        try:
            while True:
                while steps:
                    yield steps.popleft()
                try:
                    step = next(self)
                except StopIteration:
                    return
                yield step
        finally:
            self.close()

    def __next__(self) -> Step:
        queue = self._queue
        while not queue.ended:
            if queue.steps:
                return queue.steps.popleft()
            self._wait()
        if queue.steps:
            return queue.steps.popleft()
        error, queue.error = queue.error, None
        if error is not None:
            raise error
        raise StopIteration

    def _wait(self) -> None:
        """Wait until there is something to read."""
        queue = self._queue
        with self._waiting() as wait:
            queue.readers += 1
            try:
                while not queue.steps and not queue.ended:
                    wait(_ALIVE_CHECK_S)
            finally:
                queue.readers -= 1

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[Callable[[float], object]]:
        """Hold the queue's lock; yields a function that waits for a change, at most some seconds,
        and raises if the work was cancelled or the engine is no longer alive."""
        self._check_caller()
        changed, scope = self._queue.changed, current_scope()

        def wake() -> None:
            with changed:
                changed.notify_all()

        def wait(seconds: float) -> None:
            scope.check()
            if not changed.wait(seconds):
                self._check_alive()

        with scope.on_cancel(wake), changed:
            yield wait

    def __aiter__(self) -> AsyncIterator[Step]:
        return self._async_steps()

    async def _async_steps(self) -> AsyncIterator[Step]:
        import asyncio  # large, and needed by asynchronous readers only

        self._check_caller()
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(news.set)

        self.add_listener(wake)
        try:
            while True:
                news.clear()
                steps, ended = self.read_available()
                for step in steps:
                    yield step
                if ended:
                    return
                if steps:
                    continue  # an error may have arrived right after them
                try:
                    async with asyncio.timeout(_ALIVE_CHECK_S):
                        await news.wait()
                except TimeoutError:
                    self._check_alive()
        finally:
            self.remove_listener(wake)
            self.close()

    def wait_for_end(self, seconds: float) -> bool:
        """Wait until the text has ended, at most so long, and return whether it has.

        The steps wait too, to be read together: that takes less time than one by one.
        """
        with self._waiting() as wait:
            if not self._queue.ended:
                wait(seconds)
        return self._queue.ended

    # -- reading without waiting -------------------------------------------------------------

    def add_listener(self, listener: Callable[[], object]) -> None:
        """Call `listener` on the engine's thread for every news; also now, if there is any."""
        with self._queue.changed:
            self._queue.listeners.append(listener)
            if self._queue.steps or self._queue.ended:
                listener()

    def remove_listener(self, listener: Callable[[], object]) -> None:
        """Stop calling `listener`."""
        with self._queue.changed, contextlib.suppress(ValueError):
            self._queue.listeners.remove(listener)

    def read_available(self) -> tuple[list[Step], bool]:
        """Return the steps that arrived since the last call, and whether they were the last ones.

        If the text ended with an error, that is raised once its steps have been read.
        """
        queue = self._queue
        steps: list[Step] = []
        ended = queue.ended  # read first: steps may arrive meanwhile
        while queue.steps:
            steps.append(queue.steps.popleft())
        if ended and queue.error is not None:
            if steps:
                return steps, False
            error, queue.error = queue.error, None
            raise error
        return steps, ended

    # -- closing -----------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel the generation if it still runs; its pages are free at the next step."""
        if not self._queue.ended:
            with contextlib.suppress(UnspoolError):  # the engine may be closed already
                self._cancel()

    def __enter__(self) -> StepStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
