"""The texts of one request, as their steps come from the engine's thread to the event loop.

Several prompts, or several choices of one prompt, are written side by side. The first choice of a
prompt is begun first; the others follow with its first token, when the prompt is computed, and
share it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
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
from unspool.serve.http.metrics import Metrics
from unspool.serve.http.threads import in_thread


@dataclass(slots=True, eq=False)
class Text:
    """One text on its way."""

    generation: Generation
    stream: StepStream
    counted: int = 0  # steps that the metrics know of
    ended: bool = False

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
    at_once: int = 1  # prompts; the next one is begun when one is finished
    texts: dict[int, Text] = field(default_factory=dict)  # by the number of the choice
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _streams: list[StepStream] = field(default_factory=list)  # all that were ever started
    _closed: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _notified: bool = False
    _started_prompts: int = 0  # prompts

    async def start(self) -> None:
        """Check what was asked for, and start the first text of as many prompts as may run."""
        for _ in range(min(self.at_once, len(self.prompts))):
            await self._start_prompt()

    async def _start_prompt(self) -> None:
        self._started_prompts += 1
        await self._start((self._started_prompts - 1) * self.n)

    async def batches(self) -> AsyncIterator[list[tuple[int, Step]]]:
        """(number of the choice, step), as many as there are each time."""
        while True:
            self._news.clear()
            self._notified = False
            batch: list[tuple[int, Step]] = []
            for number, text in list(self.texts.items()):
                if text.ended:
                    continue
                steps, text.ended = text.stream.waiting()
                if steps:
                    self._count(text, steps)
                    batch += [(number, step) for step in steps]
                if (steps or text.ended) and self.n > 1 and number % self.n == 0:
                    await self._start_others(number)
                if (
                    text.ended
                    and self._started_prompts < len(self.prompts)
                    and self._all_ended(number)
                ):
                    await self._start_prompt()
            if batch:
                yield batch
            elif all(text.ended for text in self.texts.values()):
                return
            else:
                await self._news.wait()

    def _all_ended(self, number: int) -> bool:
        """Whether all choices of this one's prompt are written."""
        first = number - number % self.n
        return all(
            choice in self.texts and self.texts[choice].ended
            for choice in range(first, first + self.n)
        )

    async def final_batches(self, *, live: bool = False) -> AsyncIterator[list[tuple[int, Step]]]:
        """`batches`, but nothing that may be taken back: with a guard that rewinds, all of it
        comes in the end. `live`: as it comes all the same, for a reader who knows of `retracts`."""
        if self._may_rewind and not live:
            await self.finish()
            yield [(i, step) for i, text in enumerate(self.all) for step in text.generation.steps]
            return
        async for batch in self.batches():
            yield batch

    @property
    def _may_rewind(self) -> bool:
        guards = self.texts[0].generation.request.guards
        return guards is not None and guards.action == "rewind"

    async def finish(self) -> None:
        """Wait until all are written."""
        async for _ in self.batches():
            pass

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

    def usage(self) -> dict[str, Any]:
        """As OpenAI counts: a prompt once, however many choices it has."""
        prompt = sum(len(ids) for ids in self.prompts)
        written = sum(len(text.generation.steps) for text in self.texts.values())
        firsts = [text for number, text in self.texts.items() if number % self.n == 0]
        drafted = sum(text.stream.drafted for text in self.texts.values())
        accepted = sum(text.stream.accepted for text in self.texts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {
                "cached_tokens": sum(text.reused for text in firsts),
                "audio_tokens": 0,
            },
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    # -- inside ------------------------------------------------------------------------------

    async def _start(self, number: int) -> None:
        generation, stream = await in_thread(self._open, number)
        self.texts[number] = Text(generation, stream)
        loop = asyncio.get_running_loop()
        stream.listen(lambda: self._notify(loop))

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
        return self.served.lm.begin(prompt, **options)

    async def _start_others(self, first: int) -> None:
        if first + 1 not in self.texts:
            # All choices have one seed, which the first one may have been given at random.
            self.options["seed"] = self.texts[first].generation.seed
            for number in range(first + 1, first + self.n):
                await self._start(number)

    def _notify(self, loop: asyncio.AbstractEventLoop) -> None:
        """On the engine's thread: wake the reader, once for all that came since it last looked."""
        if not self._notified:
            self._notified = True
            with suppress(RuntimeError):  # the server has stopped meanwhile
                loop.call_soon_threadsafe(self._news.set)

    def _count(self, text: Text, steps: Sequence[Step]) -> None:
        name, metrics = self.served.name, self.metrics
        if not text.counted:
            metrics.first_token.labels(name).observe(perf_counter() - self.arrived)
        for step in steps:
            text.generation.take(step)
            if text.counted:
                self._per_token.observe(step.seconds)
            text.counted += 1

    @cached_property
    def _per_token(self) -> Any:
        return self.metrics.per_token.labels(self.served.name)

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
