"""The event loop woken from other threads: once for all that has happened since it last looked.

A step brings a token to each of hundreds of texts. Waking the loop for every one of them would cost
more than what is then done about it. And where a round of all that is to be done takes long, the
next one waits twice as long: what comes meanwhile is sent in one piece, and whoever computes (the
engine's thread, with which this one shares Python's lock) is not held up by its readers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary

_SHORT = 0.001  # seconds: a round that does not count
_LONGEST_PAUSE = 0.02  # seconds between rounds; nobody sees a text stutter at that


class Waking:
    """What is to be called on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], object]] = deque()
        self._is_woken = False

    @classmethod
    def here(cls) -> Waking:
        """The one of the loop that runs on this thread."""
        loop = asyncio.get_running_loop()
        if loop not in _known:
            _known[loop] = cls(loop)
        return _known[loop]

    def call(self, work: Callable[[], object]) -> None:
        """From any thread: have this called on the loop, soon."""
        self._calls.append(work)
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the server has stopped meanwhile
                self._loop.call_soon_threadsafe(self._carry_out)

    def _carry_out(self) -> None:
        began, calls = self._loop.time(), self._calls
        for _ in range(len(calls)):
            work = calls.popleft()
            try:
                work()
            except Exception as error:  # one reader's, and no other's
                said = {"message": "a reader's callback failed", "exception": error}
                self._loop.call_exception_handler(said)
        took = self._loop.time() - began
        if took > _SHORT:
            self._loop.call_later(min(2 * took, _LONGEST_PAUSE), self._go_on)
        else:
            self._go_on()

    def _go_on(self) -> None:
        self._is_woken = False  # before looking: what comes from now on wakes again
        if self._calls:
            self._is_woken = True
            self._loop.call_soon(self._carry_out)


_known: WeakKeyDictionary[asyncio.AbstractEventLoop, Waking] = WeakKeyDictionary()
