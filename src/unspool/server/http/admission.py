"""Admission control: which requests run, which queue, and which are rejected.

The limit counts running texts, not requests: a request with eight choices takes eight places. A
request that finds no place queues; when the queue is full it is rejected with 429 and Retry-After.

A request with many rows (prompts to complete, texts to embed) enters with the places of one row.
It takes more while enough are free, and returns them row by row, so that a request of 128 rows
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

from unspool.server.http.errors import ApiError, shutting_down

_MAX_RETRY_AFTER = 60  # seconds
_MAX_SHARE = 3  # places that a request may grow to, as a multiple of the places that stay free


@dataclass(slots=True, eq=False)
class _QueuedRequest:
    places: int
    turn: asyncio.Future[None]


class Admission:
    """Places for texts, granted first come, first served. Owned by the event loop."""

    def __init__(self, max_running: int, max_queued: int) -> None:
        self.max_running, self.max_queued = max_running, max_queued
        self.running = 0  # places in use
        self.is_stopping = False  # the server is shutting down
        self._queue: deque[_QueuedRequest] = deque()
        self._mean_s = 1.0  # duration of a request, smoothed

    @property
    def queued(self) -> int:
        return len(self._queue)

    @asynccontextmanager
    async def places(self, count: int) -> AsyncIterator[Lease]:
        """Wait for this many places and hold them. Raises 429 immediately if the queue is full.

        Requests that compute nothing take 0 places, and never queue.
        """
        await self._enter(count)
        lease = Lease(self, count)
        try:
            yield lease
        finally:
            lease.release()

    async def _enter(self, places: int) -> None:
        if self.is_stopping:
            raise shutting_down()
        if places > self.max_running:
            raise ApiError(
                400,
                f"{places} texts requested; this server runs at most {self.max_running} at a time",
                param="n",
            )
        if not places:
            return
        if not self._queue and self.running + places <= self.max_running:
            self.running += places
            return
        if len(self._queue) >= self.max_queued:
            raise ApiError(
                429,
                f"the server is busy: {self.running} texts are running and "
                f"{len(self._queue)} requests are queued; try again later",
                code="queue_full",
                retry_after=self._retry_after(),
            )
        queued = _QueuedRequest(places, asyncio.get_running_loop().create_future())
        self._queue.append(queued)
        try:
            await queued.turn
        except asyncio.CancelledError:
            if queued in self._queue:
                self._queue.remove(queued)
                self._admit_queued()  # a smaller one after it may fit
            elif not queued.turn.cancelled():
                self.release(places)  # it was admitted just before it was cancelled
            raise

    def release(self, places: int, held_s: float | None = None) -> None:
        """Free places. `held_s`: how long an ended request has held them."""
        self.running -= places
        if held_s is not None:
            self._mean_s += 0.1 * (held_s - self._mean_s)
        self._admit_queued()

    def _admit_queued(self) -> None:
        """Admit queued requests that fit. Requests whose cancellation is pending are dropped."""
        while self._queue and self.running + self._queue[0].places <= self.max_running:
            queued = self._queue.popleft()
            if not queued.turn.done():
                self.running += queued.places
                queued.turn.set_result(None)

    def _retry_after(self) -> int:
        """Estimated seconds until the queue has room again."""
        rounds = (len(self._queue) + 1) / self.max_running
        return max(1, min(_MAX_RETRY_AFTER, math.ceil(rounds * self._mean_s)))


class Lease:
    """The places that one request holds. They are freed when the request and all its threads have
    released them: a thread whose client has disconnected still occupies a place."""

    def __init__(self, admission: Admission, count: int) -> None:
        self._admission, self._count = admission, count
        self._holders = 1
        self._since = perf_counter()

    def grow(self, places: int) -> bool:
        """Take places for one more row. False if requests are queued or too few would stay free."""
        admission = self._admission
        free = admission.max_running - admission.running - places
        if admission.queued or self._count + places > _MAX_SHARE * free:
            return False
        admission.running += places
        self._count += places
        return True

    def shrink(self, places: int) -> None:
        """Return the places of a finished row, taken by `grow`."""
        self._count -= places
        self._admission.release(places)

    def retain(self) -> None:
        """Add a holder, which must call `release` too."""
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if not self._holders and self._count:
            held_s = perf_counter() - self._since
            self._admission.release(self._count, held_s)
