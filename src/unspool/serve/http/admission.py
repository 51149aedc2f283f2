"""Who may run now, who waits, and who is sent away.

Texts that run at once are counted, not requests: one that wants eight choices takes eight places.
Who finds no place waits in line; when the line is full, the next one is told when to come back.

A request with many rows (prompts to complete, texts to embed) enters with the places of one row.
It takes more while there are enough, and gives them back row by row, so that a request of 128 rows
delays others by one row at most.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter

from unspool.serve.http.errors import ApiError, shutting_down

_LONGEST_ADVICE = 60  # seconds
_MAX_SHARE = 3  # places that a request may grow to, as a multiple of the places that stay free


@dataclass(slots=True, eq=False)
class _Waiter:
    places: int
    turn: asyncio.Future[None]


class Admission:
    """Places for texts, given out in the order of asking. Owned by the event loop."""

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
    async def places(self, count: int) -> AsyncIterator[Lease]:
        """Hold this many places; waits for them. Raises at once when the line is full.

        Requests that compute nothing ask for 0 places, and never wait.
        """
        await self._enter(count)
        lease = Lease(self, count)
        try:
            yield lease
        finally:
            lease.release()

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
        if not places:
            return
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
            if waiter in self._line:
                self._line.remove(waiter)
                self._next()  # a smaller one behind it may fit
            elif not waiter.turn.cancelled():
                self.give_back(places)  # its turn had come just then
            raise

    def give_back(self, places: int, held_s: float | None = None) -> None:
        """Free places; `held_s` is how long a request has held them, when it has ended."""
        self.running -= places
        if held_s is not None:
            self._seconds += 0.1 * (held_s - self._seconds)
        self._next()

    def _next(self) -> None:
        """Hand out places to those that wait. Cancelled waiters are dropped: they may not have
        been told yet that they are."""
        while self._line and self.running + self._line[0].places <= self.max_running:
            waiter = self._line.popleft()
            if not waiter.turn.done():
                self.running += waiter.places
                waiter.turn.set_result(None)

    def _advice(self) -> int:
        """In how many seconds there should be room in the line again."""
        rounds = (len(self._line) + 1) / self.max_running
        return max(1, min(_LONGEST_ADVICE, math.ceil(rounds * self._seconds)))


class Lease:
    """The places that one request holds. They are free when the request and all threads that work
    for it have released them: a thread whose client has left still takes its place."""

    def __init__(self, admission: Admission, count: int) -> None:
        self._admission, self._count = admission, count
        self._holders = 1
        self._since = perf_counter()

    def grow(self, places: int) -> bool:
        """Take more places for one more row. False: others wait, or too few would stay free."""
        admission = self._admission
        free = admission.max_running - admission.running - places
        if admission.queued or self._count + places > _MAX_SHARE * free:
            return False
        admission.running += places
        self._count += places
        return True

    def shrink(self, places: int) -> None:
        """Give back what `grow` has taken, when a row is finished."""
        self._count -= places
        self._admission.give_back(places)

    def retain(self) -> None:
        """Keep the places for one more holder, which releases them itself."""
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if not self._holders and self._count:
            held_s = perf_counter() - self._since
            self._admission.give_back(self._count, held_s)
