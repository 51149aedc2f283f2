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
        self._listeners: list[Callable[[], None]] = []
        self.prompt_reused = 0  # tokens of the prompt that were computed before
        self.missed_from: int | None = None  # from which token of the prompt on nothing was
        self.notes: list[str] = []  # what the engine has to say, such as that drafting was stopped

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

        def listener() -> None:
            loop.call_soon_threadsafe(news.set)

        with self._changed:
            self._listeners.append(listener)
        try:
            while True:
                news.clear()
                with self._changed:
                    ready, ended = bool(self._waiting), self._ended
                if ready or ended:
                    try:
                        step = self._take()
                    except StopIteration:
                        return
                    yield step
                else:
                    await news.wait()
        finally:
            with self._changed:
                self._listeners.remove(listener)
            self.close()

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
