"""The steps of a running generation, on their way from the engine's thread to whoever reads them.

Steps wait in a queue of their own, so a reader that stops reading holds up nobody. Closing the
stream, or leaving its loop, cancels the generation and gives its pages back.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from unspool.engine.steps import Step
from unspool.errors import UnspoolError


class StepStream(Iterator[Step]):
    """Iterate, or iterate asynchronously, over the steps of one generation."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._waiting: deque[Step] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self._listeners: list[Callable[[], object]] = []
        self.prompt_reused = 0  # tokens of the prompt that were computed before
        self.missed_from: int | None = None  # from which token of the prompt on nothing was
        self.notes: list[str] = []  # what the engine has to say, such as that drafting was stopped
        self.stopped_by: str | None = None  # the stop string that ended the text
        self.drafted = self.accepted = 0  # tokens guessed ahead, and those of them that were right

    # -- the engine's side -------------------------------------------------------------------

    def put(self, step: Step) -> None:
        with self._changed:
            self._waiting.append(step)
            self._tell()

    def end(self, error: BaseException | None = None) -> None:
        with self._changed:
            if not self._ended:
                self._ended, self._error = True, error
                self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()

    # -- the reader's side -------------------------------------------------------------------

    def __next__(self) -> Step:
        with self._changed:
            while not self._waiting and not self._ended:
                self._changed.wait()
            return self._take()

    def _take(self) -> Step:
        if self._waiting:
            return self._waiting.popleft()
        error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[Step]:
        return self._async_steps()

    async def _async_steps(self) -> AsyncIterator[Step]:
        import asyncio  # only who awaits needs it, and it is large

        loop, news = asyncio.get_running_loop(), asyncio.Event()
        self.listen(lambda: loop.call_soon_threadsafe(news.set))
        try:
            while True:
                news.clear()
                steps, ended = self.waiting()
                for step in steps:
                    yield step
                if ended:
                    return
                await news.wait()
        finally:
            self.close()

    def listen(self, listener: Callable[[], object]) -> None:
        """Call this, on the engine's thread, whenever there is something new; now too, if so."""
        with self._changed:
            self._listeners.append(listener)
            if self._waiting or self._ended:
                listener()

    def waiting(self) -> tuple[list[Step], bool]:
        """The steps that have come since, without waiting, and whether these were the last ones.

        Raises what ended the text, if that was an error, once its steps have been taken.
        """
        with self._changed:
            steps = list(self._waiting)
            self._waiting.clear()
            if self._error is not None and not steps:
                error, self._error = self._error, None
                raise error
            return steps, self._ended and self._error is None

    def close(self) -> None:
        """Stop the generation, if it still runs; its pages are free at the next step."""
        if not self._ended:
            self._cancel()

    def __enter__(self) -> StepStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(UnspoolError):  # the engine may be gone before us
            self.close()
