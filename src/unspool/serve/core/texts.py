"""The texts of one request, as their steps come from the engine's thread to the event loop.

Several prompts, or several choices of one prompt, are written side by side. The first choice of a
prompt is begun first; the others follow with its first token, when the prompt is computed, and
share it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any

from unspool.engine.generation import Generation
from unspool.engine.steps import Step
from unspool.engine.stream import StepStream
from unspool.errors import UnspoolError
from unspool.serve.core.registry import ServedModel
from unspool.serve.core.waking import Waking
from unspool.serve.http.admission import Lease
from unspool.serve.http.metrics import Metrics, Times
from unspool.serve.http.threads import Runner, in_thread
from unspool.serve.http.wire import Wire

# Takes (number of the choice, step), as many as there are.
Take = Callable[[list[tuple[int, Step]]], object]


@dataclass(slots=True, eq=False)
class Text:
    """One text on its way."""

    generation: Generation
    stream: StepStream
    counted: int = 0  # steps that the metrics know of
    ended: bool = False
    progress: int | None = None  # tokens of the prompt that were last reported as computed
    progress_since: float = 0.0  # when the first report was made, by perf_counter
    prompt_s: float = 0.0  # until the first token
    later_s: float = 0.0  # between the first token and the last

    @property
    def reused(self) -> int:
        return self.stream.prompt_reused


@dataclass(eq=False)
class Texts:
    """All texts that one request asked for: `n` of each prompt."""

    served: ServedModel
    metrics: Metrics
    arrived: float  # when the request came, by perf_counter
    prompts: list[list[int]]
    n: int
    options: dict[str, Any]
    warms: bool = False  # the prompts are computed, for the prefix cache, and nothing is written
    run: Runner = in_thread
    lease: Lease | None = None  # the places of one prompt, and of others while there are enough
    texts: dict[int, Text] = field(default_factory=dict)  # by the number of the choice
    _on_progress: Callable[[int, int], object] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _streams: list[StepStream] = field(default_factory=list)  # all that were ever started
    _closed: bool = False
    _take: Take | None = None  # who is handed the steps
    _wire: Wire | None = None
    _fault: Exception | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)  # more to do than to hand on steps
    _notified: bool = False
    _writing: dict[int, Text] = field(default_factory=dict)  # of the texts, those not ended
    _started_prompts: int = 0
    _left: dict[int, int] = field(default_factory=dict)  # choices to be written, by prompt begun

    async def start(self) -> None:
        """Check what was asked for, and start the first text of as many prompts as may run."""
        await self._start_prompts()

    async def _start_prompts(self) -> None:
        while self._started_prompts < len(self.prompts) and (
            not self._left or (self.lease is not None and self.lease.grow(self.n))
        ):
            await self._start_prompt()

    async def _start_prompt(self) -> None:
        prompt, self._started_prompts = self._started_prompts, self._started_prompts + 1
        self._left[prompt] = self.n
        await self._start(prompt * self.n)

    async def deliver(self, take: Take, wire: Wire | None = None) -> None:
        """Hand the steps to `take` as they come, as many as there are each time, until all texts
        are written. That happens on the event loop as soon as it is woken, and this task sleeps
        meanwhile. With a `wire`, nothing is handed on while that is full."""
        self._take, self._wire = take, wire
        try:
            while True:
                self._news.clear()
                if wire is not None and wire.is_full:
                    await wire.drain()
                is_more = self._look()
                if self._fault is not None:
                    raise self._fault
                await self._start_more()
                if not self._writing and self._started_prompts == len(self.prompts):
                    return
                if not is_more:
                    await self._news.wait()
        finally:
            self._take = None

    async def deliver_final(
        self, take: Take, wire: Wire | None = None, *, live: bool = False
    ) -> None:
        """`deliver`, but nothing that may be taken back: with a guard that rewinds, all of it
        comes in the end. `live`: as it comes all the same, for a reader who knows of `retracts`."""
        if self._may_rewind and not live:
            await self.finish()
            take([(i, step) for i, text in enumerate(self.all) for step in text.generation.steps])
        else:
            await self.deliver(take, wire)

    @property
    def _may_rewind(self) -> bool:
        guards = self.texts[0].generation.request.guards
        return guards is not None and guards.action == "rewind"

    def watch_progress(self, report: Callable[[int, int], object]) -> None:
        """While steps are delivered, call `report(choice number, tokens computed)` as prompts are
        computed: first with what was cached, last with the whole length."""
        self._on_progress = report
        for text in self._writing.values():
            text.stream.watch_prompt()

    async def finish(self) -> None:
        """Wait until all are written."""
        await self.deliver(lambda steps: None)

    def close(self) -> None:
        """Stop whatever still runs, also what a thread is only about to start."""
        with self._lock:
            self._closed = True
        for stream in self._streams:
            with suppress(UnspoolError):  # an engine that was closed meanwhile
                stream.close()

    @property
    def all(self) -> list[Text]:
        return [self.texts[number] for number in sorted(self.texts)]

    @property
    def notes(self) -> list[str]:
        """What the engine had to say of them, such as what an endless text has forgotten."""
        return [note for text in self.all for note in text.stream.notes]

    def usage(self) -> dict[str, Any]:
        """As OpenAI counts: a prompt once, however many choices it has."""
        prompt = sum(len(ids) for ids in self.prompts)
        written = sum(len(text.generation.steps) for text in self.texts.values())
        firsts = [text for number, text in self.texts.items() if number % self.n == 0]
        drafted = sum(text.stream.drafted for text in self.texts.values())
        accepted = sum(text.stream.accepted for text in self.texts.values())
        steps = (step for text in self.texts.values() for step in text.generation.steps)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
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

    # -- inside ------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Hand on what has come. True: there is more to do than that."""
        steps: list[tuple[int, Step]] = []
        is_more = False
        try:
            for number, text in self._writing.items():
                found, text.ended = text.stream.waiting()
                if self._on_progress is not None and self._take is not None:
                    self._report_progress(number, text, is_read=bool(found or text.counted))
                if self.warms:
                    text.prompt_s += sum(step.seconds for step in found)
                    found = []
                if found:
                    if self.n > 1 and not text.counted:
                        is_more = True  # the others can follow
                    self._count(text, found)
                    steps += [(number, step) for step in found]
                if text.stream.ended:
                    is_more = True
            if steps and self._take is not None:
                self._take(steps)
        except Exception as error:
            self._fault, is_more = error, True
        return is_more

    def _report_progress(self, number: int, text: Text, *, is_read: bool) -> None:
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
        """The other choices of a prompt that is read, and the next prompts."""
        for number, text in list(self._writing.items()):
            if self.n > 1 and number % self.n == 0 and (text.counted or text.ended):
                await self._start_others(number)
            if text.ended:
                del self._writing[number]
                self._left[number // self.n] -= 1
                if not self._left[number // self.n]:
                    del self._left[number // self.n]
                    if self._left and self.lease is not None:
                        self.lease.shrink(self.n)
        await self._start_prompts()

    async def _start(self, number: int) -> None:
        generation, stream = await self.run(self._open, number)
        self.texts[number] = self._writing[number] = Text(generation, stream)
        if self._on_progress is not None:
            stream.watch_prompt()
        waking = Waking.here()
        stream.listen(lambda: self._notify(waking))

    def _open(self, number: int) -> tuple[Generation, StepStream]:
        """Start a text, on a thread; if nobody waits for it any more, it is stopped at once."""
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
        if self.warms:  # a token has to be written for the prompt to be computed
            empty = lm.draft(prompt, **{**options, "max_tokens": 0})
            return empty, lm.begin(prompt, **{**options, "max_tokens": 1})[1]
        return lm.begin(prompt, **options)

    async def _start_others(self, first: int) -> None:
        if first + 1 not in self.texts:
            # All choices have one seed, which the first one may have been given at random.
            self.options["seed"] = self.texts[first].generation.seed
            for number in range(first + 1, first + self.n):
                await self._start(number)

    def _notify(self, waking: Waking) -> None:
        """On the engine's thread: have somebody look, once for all that came since the last."""
        if not self._notified:
            self._notified = True
            waking.call(self._on_news)

    def _on_news(self) -> None:
        self._notified = False
        if self._take is None or (self._wire is not None and self._wire.is_full) or self._look():
            self._news.set()

    def _count(self, text: Text, steps: Sequence[Step]) -> None:
        if not text.counted:
            seconds = perf_counter() - self.arrived
            self.metrics.first_token.labels(self.served.name).observe(seconds)
        for step in steps:
            text.generation.take(step)
            if text.counted:
                self._times.add(step.seconds)
                text.later_s += step.seconds
            else:
                text.prompt_s = step.seconds
            text.counted += 1

    @cached_property
    def _times(self) -> Times:
        return self.metrics.per_token.of(self.served.name)

    def account(self) -> None:
        """Tell the metrics what all of it came to, once."""
        name, metrics = self.served.name, self.metrics
        metrics.prompt_tokens.labels(name).inc(sum(map(len, self.prompts)))
        for text in self.texts.values():
            if text.generation.request.limits.sample == self.options.get("sample", 0):
                metrics.cached_tokens.labels(name).inc(text.reused)
            metrics.completion_tokens.labels(name).inc(text.counted)
            metrics.drafts.labels(name, "proposed").inc(text.stream.drafted)
            metrics.drafts.labels(name, "accepted").inc(text.stream.accepted)
