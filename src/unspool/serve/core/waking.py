"""Wake the event loop from other threads, once for all pending callbacks.

A step brings a token to each of hundreds of texts; waking the loop for each would cost more than
handling them. After a round of callbacks that takes long, the next one is delayed by twice that
time: tokens that arrive meanwhile are sent in one piece, and the engine thread, which shares the
GIL with the loop, is not slowed down.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary

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
