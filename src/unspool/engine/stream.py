"""The steps of a running generation, on their way from the engine's thread to whoever reads them.

Steps wait in a queue of their own, so a reader that stops reading holds up nobody. Closing the
stream, leaving its loop, an interrupt, or just letting go of it cancels the generation and gives
its pages back.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from unspool.engine.steps import Step
from unspool.engine.work_scope import current_scope
from unspool.errors import UnspoolError

_LOOK_UP = 1.0  # seconds after which a reader asks whether the engine is still there


class StepQueue:
    """The engine's end of a stream: steps go in, and what there is to say about the text."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque()
        self.changed = threading.Condition()
        self.readers = 0  # that wait for a change
        self.ended = False
        self.error: BaseException | None = None
        self.listeners: list[Callable[[], object]] = []
        self.prompt_reused = 0  # tokens of the prompt that were computed before
        self.prompt_computed: int | None = None  # tokens of it that are computed; None: not begun
        self.watches_prompt = False  # listeners are called as the prompt is computed, too
        self.notes: list[str] = []  # what the engine has to say, such as that drafting was stopped
        self.stopped_by: str | None = None  # the stop string that ended the text
        self.drafted = self.accepted = 0  # tokens guessed ahead, and those of them that were right
        self.on_start: Callable[[], object] | None = None  # called at the first step, or the end

    def put(self, step: Step) -> None:
        self.steps.append(step)
        if self.readers or self.listeners or self.on_start is not None:
            self._notify()

    def end(self, error: BaseException | None = None) -> None:
        if not self.ended:
            self.error = error
            self.ended = True  # last: who sees it finds all the rest
            self._notify()

    def report_prompt(self, computed: int) -> None:
        """Say how many tokens of the prompt are computed."""
        self.prompt_computed = computed
        if self.watches_prompt:
            self._call_listeners()

    def _notify(self) -> None:
        """Most often nobody has to be told, and no lock is taken: who is about to wait, or to
        listen, says so first and then looks whether something has come."""
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
            except Exception:  # its event loop is closed, say: nobody listens there any more
                with self.changed, contextlib.suppress(ValueError):  # it may have left by itself
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
        self._check_caller = check_caller  # raises where waiting would wait for itself

    @property
    def prompt_reused(self) -> int:
        """Tokens of the prompt that were computed before."""
        return self._queue.prompt_reused

    @property
    def prompt_computed(self) -> int | None:
        """Tokens of the prompt that are computed so far; None: it has not begun."""
        return self._queue.prompt_computed

    def watch_prompt(self) -> None:
        """Call listeners also when a part of the prompt was computed."""
        self._queue.watches_prompt = True

    @property
    def notes(self) -> list[str]:
        """What the engine has to say, such as that drafting was stopped."""
        return self._queue.notes

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self._queue.stopped_by

    @property
    def drafted(self) -> int:
        """Tokens that were guessed ahead."""
        return self._queue.drafted

    @property
    def accepted(self) -> int:
        """Tokens that were guessed right."""
        return self._queue.accepted

    @property
    def ended(self) -> bool:
        """Whether nothing more comes than what waits to be read."""
        return self._queue.ended

    # -- reading, one by one -----------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        """A loop over the steps; leaving it, in whatever way, cancels what is still to come."""
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
        """Until there is something to read."""
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
                    if not queue.changed.wait(_LOOK_UP):
                        self._check_alive()
            finally:
                queue.readers -= 1

    def __aiter__(self) -> AsyncIterator[Step]:
        return self._async_steps()

    async def _async_steps(self) -> AsyncIterator[Step]:
        import asyncio  # only who awaits needs it, and it is large

        self._check_caller()
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(news.set)

        self.listen(wake)
        try:
            while True:
                news.clear()
                steps, ended = self.waiting()
                for step in steps:
                    yield step
                if ended:
                    return
                if steps:
                    continue  # an error may have come right behind them
                try:
                    async with asyncio.timeout(_LOOK_UP):
                        await news.wait()
                except TimeoutError:
                    self._check_alive()
        finally:
            self.unlisten(wake)
            self.close()

    # -- reading what is there, without waiting ----------------------------------------------

    def listen(self, listener: Callable[[], object]) -> None:
        """Call this, on the engine's thread, whenever there is something new; now too, if so."""
        with self._queue.changed:
            self._queue.listeners.append(listener)
            if self._queue.steps or self._queue.ended:
                listener()

    def unlisten(self, listener: Callable[[], object]) -> None:
        """Call this no more."""
        with self._queue.changed, contextlib.suppress(ValueError):
            self._queue.listeners.remove(listener)

    def waiting(self) -> tuple[list[Step], bool]:
        """The steps that have come since, without waiting, and whether these were the last ones.

        Raises what ended the text, if that was an error, once its steps have been taken.
        """
        queue = self._queue
        steps: list[Step] = []
        ended = queue.ended  # asked first: what comes while we look is for the next time
        while queue.steps:
            steps.append(queue.steps.popleft())
        if ended and queue.error is not None:
            if steps:
                return steps, False
            error, queue.error = queue.error, None
            raise error
        return steps, ended

    # -- leaving -----------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the generation, if it still runs; its pages are free at the next step."""
        if not self._queue.ended:
            with contextlib.suppress(UnspoolError):  # the engine may be gone before us
                self._cancel()

    def __enter__(self) -> StepStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
