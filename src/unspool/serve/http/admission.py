"""Who may run now, who waits, and who is sent away.

Texts that run at once are counted, not requests: one that wants eight choices takes eight places.
Who finds no place waits in line; when the line is full, the next one is told when to come back.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import perf_counter

from unspool.serve.http.errors import ApiError, shutting_down

_LONGEST_ADVICE = 60  # seconds


@dataclass(slots=True, eq=False)
class _Waiter:
    places: int
    turn: asyncio.Future[None]


class Admission:
    """Places for texts, given out in the order of asking."""

    def __init__(self, max_running: int, max_queued: int) -> None:
        self.max_running, self.max_queued = max_running, max_queued
        self.running = 0  # places taken
        self.refusing = False  # the server is about to stop
        self._line: deque[_Waiter] = deque()
        self._seconds = 1.0  # that a request took lately, smoothed

    @property
    def queued(self) -> int:
        return len(self._line)

    @asynccontextmanager
    async def places(self, count: int) -> AsyncIterator[None]:
        """Hold this many places; waits for them. Raises at once when the line is full."""
        await self._enter(count)
        since = perf_counter()
        try:
            yield
        finally:
            self._leave(count, perf_counter() - since)

    async def _enter(self, places: int) -> None:
        if self.refusing:
            raise shutting_down()
        if places > self.max_running:
            raise ApiError(
                400,
                f"{places} texts were asked for, and this server writes at most "
                f"{self.max_running} at once",
                param="n",
            )
        if not self._line and self.running + places <= self.max_running:
            self.running += places
            return
        if len(self._line) >= self.max_queued:
            raise ApiError(
                429,
                f"the server is busy: {self.running} texts are being written and "
                f"{len(self._line)} requests wait; try again later",
                code="queue_full",
                retry_after=self._advice(),
            )
        waiter = _Waiter(places, asyncio.get_running_loop().create_future())
        self._line.append(waiter)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled():
                self._leave(places, None)  # its turn had come just then
            else:
                with suppress(ValueError):  # `_next` drops cancelled waiters too
                    self._line.remove(waiter)
                self._next()  # a smaller one behind it may fit
            raise

    def _leave(self, places: int, seconds: float | None) -> None:
        """Give places back; `seconds` is how long they were held, if they were."""
        self.running -= places
        if seconds is not None:
            self._seconds += 0.1 * (seconds - self._seconds)
        self._next()

    def _next(self) -> None:
        while self._line and self.running + self._line[0].places <= self.max_running:
            waiter = self._line.popleft()
            if not waiter.turn.done():
                self.running += waiter.places
                waiter.turn.set_result(None)

    def _advice(self) -> int:
        """In how many seconds there should be room in the line again."""
        rounds = (len(self._line) + 1) / self.max_running
        return max(1, min(_LONGEST_ADVICE, math.ceil(rounds * self._seconds)))
