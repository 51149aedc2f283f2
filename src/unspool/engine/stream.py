"""The stream of steps from the engine's thread to the reader of a generation.

Each generation has its own queue, so a slow reader delays no other. Closing the stream, leaving its
loop, an interrupt, or dropping the last reference cancels the generation and releases its pages.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from unspool.engine.steps import Step
from unspool.engine.work_scope import current_scope
from unspool.errors import UnspoolError

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

        Without any, no lock is taken: a reader registers first, and then checks for new steps.
        """
        if self.readers or self.on_start is not None:
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
        try:
            while True:
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
        self._check_caller()
        queue, scope = self._queue, current_scope()

        def wake() -> None:
            with queue.changed:
                queue.changed.notify_all()

        with scope.on_cancel(wake), queue.changed:
            queue.readers += 1
            try:
                while not queue.steps and not queue.ended:
                    scope.check()
                    if not queue.changed.wait(_ALIVE_CHECK_S):
                        self._check_alive()
            finally:
                queue.readers -= 1

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
