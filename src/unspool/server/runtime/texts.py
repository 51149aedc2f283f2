"""The texts of one request: their steps move from the engine thread to the event loop.

Several prompts, or several choices of one prompt, run in parallel. The first choice of a prompt
starts first; the others start with its first token, when the prompt is computed, and share it.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from unspool.decoding.infill.causal import start_ids
from unspool.decoding.infill.fill import (
    FimTokens,
    OtherFile,
    fill,
    fim_prompt,
    fim_tokens,
    make_fim_request,
)
from unspool.decoding.infill.result import LONGEST, Filling, Gap
from unspool.engine.generation import Generation
from unspool.engine.results import Candidate, Step, StepQueue, StepStream
from unspool.errors import UnspoolError
from unspool.sampling.chain import StageReport
from unspool.server.http.admission import Lease
from unspool.server.http.events import Wire
from unspool.server.runtime.hidden_states import check_hidden_states, read_hidden_states
from unspool.server.runtime.metrics import Metrics, TokenHistogram
from unspool.server.runtime.registry import ServedModel
from unspool.server.runtime.schema import HiddenStates
from unspool.server.runtime.threads import Runner, in_thread
from unspool.session import Session

# -- Wake the event loop from other threads, once for all pending callbacks

_SHORT_ROUND_S = 0.001  # no delay after a round up to this long
_MAX_PAUSE_S = 0.02  # between rounds; not visible as stutter


class LoopWaker:
    """Callbacks to run on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], object]] = deque()
        self._is_woken = False

    @classmethod
    def for_running_loop(cls) -> LoopWaker:
        """The waker of the event loop that runs on this thread."""
        loop = asyncio.get_running_loop()
        if loop not in _wakers:
            _wakers[loop] = cls(loop)
        return _wakers[loop]

    def schedule(self, callback: Callable[[], object]) -> None:
        """Call this soon on the loop. Thread-safe."""
        self._calls.append(callback)
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._run_callbacks)

    def _run_callbacks(self) -> None:
        began, calls = self._loop.time(), self._calls
        for _ in range(len(calls)):
            callback = calls.popleft()
            try:
                callback()
            except Exception as error:  # must not affect other requests
                context = {"message": "a callback failed", "exception": error}
                self._loop.call_exception_handler(context)
        round_s = self._loop.time() - began
        if round_s > _SHORT_ROUND_S:
            self._loop.call_later(min(2 * round_s, _MAX_PAUSE_S), self._next_round)
        else:
            self._next_round()

    def _next_round(self) -> None:
        self._is_woken = False  # first: callbacks scheduled from now on wake the loop again
        if self._calls:
            self._is_woken = True
            self._loop.call_soon(self._run_callbacks)


_wakers: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = WeakKeyDictionary()


# Receives (index of the choice, step) pairs.
StepSink = Callable[[list[tuple[int, Step]]], object]


@dataclass(slots=True, eq=False)
class RequestText:
    """One running text."""

    generation: Generation
    stream: StepStream
    counted: int = 0  # steps counted in the metrics
    ended: bool = False
    progress: int | None = None  # prompt tokens last reported as computed
    progress_since: float = 0.0  # time of the first report, by perf_counter
    prompt_s: float = 0.0  # until the first token
    later_s: float = 0.0  # between the first token and the last

    @property
    def reused(self) -> int:
        return self.stream.prompt_reused


@dataclass(eq=False)
class RequestTexts:
    """All texts of one request: `n` for each prompt."""

    served: ServedModel
    metrics: Metrics
    arrived: float  # time of the request, by perf_counter
    prompts: list[list[int]]
    n: int
    options: dict[str, Any]
    warms: bool = False  # compute prompts for the prefix cache, generate nothing
    run: Runner = in_thread
    lease: Lease | None = None  # places of one prompt, and of more while enough are free
    texts: dict[int, RequestText] = field(default_factory=dict)  # by index of the choice
    hidden_states: list[dict[str, Any]] | None = None  # of each choice, once all have ended
    _on_progress: Callable[[int, int], object] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _streams: list[StepStream] = field(default_factory=list)  # all that were started
    _closed: bool = False
    _sink: StepSink | None = None  # receives the steps
    _wire: Wire | None = None
    _fault: Exception | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)  # not only steps to deliver
    _notified: bool = False
    _writing: dict[int, RequestText] = field(default_factory=dict)  # texts that have not ended
    _started_prompts: int = 0
    _num_open: dict[int, int] = field(default_factory=dict)  # unfinished choices, by prompt

    def __post_init__(self) -> None:
        self._returned: HiddenStates | None = self.options.pop("hidden_states", None)

    async def start(self) -> None:
        """Check the options, and start the first text of as many prompts as have places."""
        if self._returned is not None:
            texts = [ids for ids in self.prompts for _ in range(self.n)]
            await self.run(check_hidden_states, self.served.lm, self._returned, texts)
        await self._start_prompts()

    async def _start_prompts(self) -> None:
        while self._started_prompts < len(self.prompts) and (
            not self._num_open or (self.lease is not None and self.lease.grow(self.n))
        ):
            await self._start_prompt()

    async def _start_prompt(self) -> None:
        prompt, self._started_prompts = self._started_prompts, self._started_prompts + 1
        self._num_open[prompt] = self.n
        await self._start(prompt * self.n)

    async def deliver(self, sink: StepSink, wire: Wire | None = None) -> None:
        """Pass steps to `sink` as they arrive, until all texts have ended.

        `sink` is called on the event loop when the engine wakes it, while this task sleeps. With a
        `wire`, nothing is passed on while that is full.
        """
        self._sink, self._wire = sink, wire
        try:
            while True:
                self._news.clear()
                if wire is not None and wire.is_full:
                    await wire.drain()
                is_more = self._poll()
                if self._fault is not None:
                    raise self._fault
                await self._start_more()
                if not self._writing and self._started_prompts == len(self.prompts):
                    await self._read_hidden_states()
                    return
                if not is_more:
                    await self._news.wait()
        finally:
            self._sink = None

    async def _read_hidden_states(self) -> None:
        if self._returned is not None and self.hidden_states is None:
            texts = [text.generation for text in self.all]
            self.hidden_states = await self.run(
                read_hidden_states, self.served.lm, self._returned, texts
            )

    async def deliver_final(
        self, sink: StepSink, wire: Wire | None = None, *, live: bool = False
    ) -> None:
        """`deliver` without steps that may be retracted: with a guard that rewinds, all steps
        arrive at the end. `live`: deliver them anyway, for a client that handles `retracts`."""
        if self._may_rewind and not live:
            await self.finish()
            sink([(i, step) for i, text in enumerate(self.all) for step in text.generation.steps])
        else:
            await self.deliver(sink, wire)

    @property
    def _may_rewind(self) -> bool:
        guards = self.texts[0].generation.request.guards
        return guards is not None and guards.action == "rewind"

    def watch_progress(self, report: Callable[[int, int], object]) -> None:
        """While steps are delivered, call `report(choice index, tokens computed)` as prompts are
        computed: first with the cached tokens, last with the length of the prompt."""
        self._on_progress = report
        for text in self._writing.values():
            text.stream.watch_prompt()

    async def finish(self) -> None:
        """Wait until all texts have ended."""
        await self.deliver(lambda steps: None)

    def close(self) -> None:
        """Stop all running texts, also one that a thread is about to start."""
        with self._lock:
            self._closed = True
        for stream in self._streams:
            with suppress(UnspoolError):  # the engine is closed
                stream.close()

    @property
    def all(self) -> list[RequestText]:
        return [self.texts[number] for number in sorted(self.texts)]

    @property
    def notes(self) -> list[str]:
        """Notes of the engine, such as what an endless text has dropped."""
        return [note for text in self.all for note in text.stream.notes]

    def usage(self) -> dict[str, Any]:
        """Token usage as OpenAI counts it: a prompt once, for all its choices."""
        prompt = sum(len(ids) for ids in self.prompts)
        generated = sum(len(text.generation.steps) for text in self.texts.values())
        firsts = [text for number, text in self.texts.items() if number % self.n == 0]
        drafted = sum(text.stream.drafted for text in self.texts.values())
        accepted = sum(text.stream.accepted for text in self.texts.values())
        steps = (step for text in self.texts.values() for step in text.generation.steps)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {
                "cached_tokens": sum(text.reused for text in firsts),
                "audio_tokens": 0,
            },
            "completion_tokens_details": {
                "reasoning_tokens": sum(step.thought for step in steps),
                "audio_tokens": 0,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def _poll(self) -> bool:
        """Pass new steps to the sink. True if there is more to do: texts to start or to end."""
        steps: list[tuple[int, Step]] = []
        is_more = False
        try:
            for number, text in self._writing.items():
                new_steps, text.ended = text.stream.read_available()
                if self._on_progress is not None and self._sink is not None:
                    self._report_progress(number, text, is_read=bool(new_steps or text.counted))
                if self.warms:
                    text.prompt_s += sum(step.seconds for step in new_steps)
                    new_steps = []
                if new_steps:
                    if self.n > 1 and not text.counted:
                        is_more = True  # the other choices can start
                    self._count(text, new_steps)
                    steps += [(number, step) for step in new_steps]
                if text.stream.ended:
                    is_more = True
            if steps and self._sink is not None:
                self._sink(steps)
        except Exception as error:
            self._fault, is_more = error, True
        return is_more

    def _report_progress(self, number: int, text: RequestText, *, is_read: bool) -> None:
        total = len(self.prompts[number // self.n])
        computed = total if is_read else text.stream.prompt_computed
        if computed is None or self._on_progress is None:
            return
        if text.progress is None:
            text.progress, text.progress_since = text.reused, perf_counter()
            self._on_progress(number, text.reused)
        if computed > text.progress:
            text.progress = computed
            self._on_progress(number, computed)

    async def _start_more(self) -> None:
        """Start the other choices of a computed prompt, and the next prompts."""
        for number, text in list(self._writing.items()):
            if self.n > 1 and number % self.n == 0 and (text.counted or text.ended):
                await self._start_others(number)
            if text.ended:
                del self._writing[number]
                self._num_open[number // self.n] -= 1
                if not self._num_open[number // self.n]:
                    del self._num_open[number // self.n]
                    if self._num_open and self.lease is not None:
                        self.lease.shrink(self.n)
        await self._start_prompts()

    async def _start(self, number: int) -> None:
        generation, stream = await self.run(self._open, number)
        self.texts[number] = self._writing[number] = RequestText(generation, stream)
        if self._on_progress is not None:
            stream.watch_prompt()
        waker = LoopWaker.for_running_loop()
        stream.add_listener(lambda: self._notify(waker))

    def _open(self, number: int) -> tuple[Generation, StepStream]:
        """Start a text, on a thread. If the request has ended meanwhile, stop it again."""
        generation, stream = self._open_stream(number)
        with self._lock:
            self._streams.append(stream)
            is_late = self._closed
        if is_late:
            stream.close()
        return generation, stream

    def _open_stream(self, number: int) -> tuple[Generation, StepStream]:
        prompt, sample = self.prompts[number // self.n], number % self.n
        options = {**self.options, "sample": self.options.get("sample", 0) + sample}
        lm = self.served.lm
        if self.warms:  # the prompt is computed only if a token is generated
            empty = lm.prepare_generation(prompt, **{**options, "max_tokens": 0})
            return empty, lm.begin(prompt, **{**options, "max_tokens": 1})[1]
        return lm.begin(prompt, **options)

    async def _start_others(self, first: int) -> None:
        if first + 1 not in self.texts:
            # All choices share one seed, which may be a random one of the first.
            self.options["seed"] = self.texts[first].generation.seed
            for number in range(first + 1, first + self.n):
                await self._start(number)

    def _notify(self, waker: LoopWaker) -> None:
        """On the engine thread: schedule one poll for all new steps."""
        if not self._notified:
            self._notified = True
            waker.schedule(self._on_news)

    def _on_news(self) -> None:
        self._notified = False
        if self._sink is None or (self._wire is not None and self._wire.is_full) or self._poll():
            self._news.set()

    def _count(self, text: RequestText, steps: Sequence[Step]) -> None:
        if not text.counted:
            seconds = perf_counter() - self.arrived
            self.metrics.first_token.labels(self.served.name).observe(seconds)
        for step in steps:
            text.generation.append_step(step)
            if text.counted:
                self._times.add(step.seconds)
                text.later_s += step.seconds
            else:
                text.prompt_s = step.seconds
            text.counted += 1

    @cached_property
    def _times(self) -> TokenHistogram:
        return self.metrics.per_token.for_model(self.served.name)

    def account(self) -> None:
        """Add the tokens of all texts to the metrics. Call once."""
        name, metrics = self.served.name, self.metrics
        metrics.prompt_tokens.labels(name).inc(sum(map(len, self.prompts)))
        for text in self.texts.values():
            if text.generation.request.limits.sample == self.options.get("sample", 0):
                metrics.cached_tokens.labels(name).inc(text.reused)
            metrics.completion_tokens.labels(name).inc(text.counted)
            metrics.drafts.labels(name, "proposed").inc(text.stream.drafted)
            metrics.drafts.labels(name, "accepted").inc(text.stream.accepted)


# -- Infill: texts between a prefix and a suffix

_CANDIDATES = 20
_DEFAULT_GAP = 32  # tokens of a ranked gap without a limit


@dataclass(frozen=True, slots=True)
class InfillGap:
    """A gap between two texts. `others`: further files that the model reads first."""

    prefix: str
    suffix: str
    others: tuple[OtherFile, ...] | None = None

    def prompt(self, lm: Session) -> list[int]:
        """The tokens of the prompt."""
        tokens = _fim(lm)
        if tokens is not None:
            return fim_prompt(lm.tokenizer, tokens, self.prefix, self.suffix, self.others)
        return lm.prompt_ids(self.before or start_ids(lm))

    @property
    def before(self) -> str:
        """Everything before the gap as one text, for a model without FIM tokens."""
        return "".join(f"{other.text}\n\n" for other in self.others or ()) + self.prefix


def _fim(lm: Session) -> FimTokens | None:
    return fim_tokens(lm.tokenizer) if lm.config.sight == "causal" else None


@dataclass(eq=False)
class InfillTexts(RequestTexts):
    """The texts of an infill request; each prompt has one gap."""

    gaps: list[InfillGap] = field(default_factory=list)
    _ranked: dict[int, Filling] = field(default_factory=dict)
    _ranking: Lock = field(default_factory=Lock)

    def _open_stream(self, number: int) -> tuple[Generation, StepStream]:
        lm, (prompt, sample) = self.served.lm, divmod(number, self.n)
        tokens = _fim(lm)
        if tokens is None:
            return self._ranked_candidate(prompt, sample)
        options = {**self.options, "sample": self.options.get("sample", 0) + sample}
        generation = make_fim_request(lm, tokens, self.prompts[prompt], options)
        return generation, lm.engine.submit(generation.request)

    def _ranked_candidate(self, prompt: int, sample: int) -> tuple[Generation, StepStream]:
        """A ranked candidate as a stream of steps."""
        with self._ranking:
            if prompt not in self._ranked:
                self._ranked[prompt] = self._rank(prompt)
        candidates = self._ranked[prompt].candidates
        steps = list(candidates[min(sample, len(candidates) - 1)].gap_steps[0])
        queue = StepQueue()
        for number, step in enumerate(steps, 1):
            queue.add(replace(step, finish_reason="stop") if number == len(steps) else step)
        queue.end()
        lm = self.served.lm
        request = lm.request(self.prompts[prompt], dict(self.options))
        return Generation(request, empty_reason="stop", source=lm), StepStream(queue)

    def _rank(self, prompt: int) -> Filling:
        lm, infill, options = self.served.lm, self.gaps[prompt], dict[str, Any](self.options)
        max_tokens = options.pop("max_tokens")
        room = max(1, lm.context - len(self.prompts[prompt]))
        gap_len = min(max_tokens, LONGEST) if max_tokens < room else _DEFAULT_GAP
        gap = Gap(1, max(1, min(gap_len, room)))
        parts: list[str | Gap] = [infill.before, gap, infill.suffix]
        return fill(lm, parts, candidates=max(_CANDIDATES, self.n), **options)


# -- Steps, timings and traces of texts as JSON: the parts under `unspool` and `timings`

Readable = Callable[[int, bytes], str]  # text of a token after an incomplete UTF-8 character


def texts_json(texts: RequestTexts, trace: bool) -> dict[str, Any]:
    """For each choice: the seed and sample that reproduce it, its log-probability and notes."""
    readable = texts.served.lm.readable
    choices = [_choice(text, trace, readable) for text in texts.all]
    for choice, states in zip(choices, texts.hidden_states or (), strict=False):
        choice["hidden_states"] = states
    return {"choices": choices}


def _choice(text: RequestText, trace: bool, readable: Readable) -> dict[str, Any]:
    generation = text.generation
    choice: dict[str, Any] = {
        "seed": generation.seed,
        "sample": generation.request.limits.sample,
        "logprob": finite(generation.logprob),
        "finish_reason": generation.finish_reason,
        "stopped_by": text.stream.stopped_by,
        "notes": list(text.stream.notes),
    }
    if trace:
        prompt = len(generation.prompt)
        choice["steps"] = [step_json(step, prompt, readable) for step in generation.steps]
    return choice


def step_json(step: Step, prompt: int, readable: Readable) -> dict[str, Any]:
    """A full step: candidate tokens, what each sampling stage did, and which one was sampled.

    As `Step.to_dict`, with its index after the `prompt` tokens of the prompt, and with readable
    tokens. `piece` is the token alone; `text` is the text that became complete with it.
    """
    partial_utf8 = step.partial_utf8
    return {
        "index": step.position - prompt,
        "position": step.position,
        "token": step.token,
        "piece": readable(step.token, partial_utf8),
        "text": step.text,
        "bytes": list(step.bytes),
        "logprob": finite(step.logprob),
        "rank": step.rank,
        "entropy": None if step.entropy is None else finite(step.entropy),
        "probability": step.probability,
        "draw": None
        if step.draw is None
        else {"u": step.draw.u, "low": step.draw.low, "high": step.draw.high},
        "candidates": [
            _candidate(candidate, readable, partial_utf8) for candidate in step.candidates
        ],
        "stages": [_stage(stage, readable, partial_utf8) for stage in step.stages],
        "seconds": step.seconds,
        "finish_reason": step.finish_reason,
        "draft": step.draft,
        "retracts": step.retracts,
        "chosen": step.chosen,
        **({"thought": True} if step.thought else {}),
    }


def _candidate(candidate: Candidate, readable: Readable, partial_utf8: bytes) -> dict[str, Any]:
    return {
        "token": candidate.token,
        "text": readable(candidate.token, partial_utf8),
        "logprob": finite(candidate.logprob),
        "probability": candidate.probability,
    }


def _stage(stage: StageReport, readable: Readable, partial_utf8: bytes) -> dict[str, Any]:
    return {
        "name": stage.name,
        "kept": stage.kept,
        "removed": stage.removed,
        "kept_mass": stage.kept_mass,
        "changed": stage.changed,
        "top": [[token, chance, readable(token, partial_utf8)] for token, chance in stage.top],
    }


def timings_json(text: RequestText) -> dict[str, Any]:
    """Prompt and decode speed of a text, as llama.cpp reports them.

    The first token is part of the prompt's time, so the decode rate is that of the others.
    """
    num_read = len(text.generation.prompt) - text.reused
    num_written = len(text.generation.steps)
    num_later = max(0, num_written - 1)
    timings: dict[str, Any] = {
        "cache_n": text.reused,
        "prompt_n": num_read,
        "prompt_ms": 1000 * text.prompt_s,
        "prompt_per_token_ms": 1000 * text.prompt_s / max(1, num_read),
        "prompt_per_second": num_read / text.prompt_s if text.prompt_s > 0 else 0.0,
        "predicted_n": num_written,
        "predicted_ms": 1000 * text.later_s,
        "predicted_per_token_ms": 1000 * text.later_s / max(1, num_later),
        "predicted_per_second": num_later / text.later_s if text.later_s > 0 else 0.0,
    }
    if text.stream.drafted:
        timings |= {"draft_n": text.stream.drafted, "draft_n_accepted": text.stream.accepted}
    return timings


def progress_json(text: RequestText, computed: int, *, timed: bool) -> dict[str, Any]:
    """Prompt progress, as llama.cpp reports it; with timings if `timed`."""
    seconds = 0.0 if computed <= text.reused else perf_counter() - text.progress_since
    progress: dict[str, Any] = {
        "prompt_progress": {
            "total": len(text.generation.prompt),
            "cache": text.reused,
            "processed": computed,
            "time_ms": round(1000 * seconds),
        }
    }
    if timed:
        num_read = computed - text.reused
        progress["timings"] = timings_json(text) | {
            "prompt_n": num_read,
            "prompt_ms": 1000 * seconds,
            "prompt_per_token_ms": 1000 * seconds / max(1, num_read),
            "prompt_per_second": num_read / seconds if seconds > 0 else 0.0,
        }
    return progress


def finite(number: float) -> float | None:
    """The number, or None if it is infinite or NaN, which JSON has not."""
    return number if math.isfinite(number) else None
