"""The queue for places: order, fairness between requests, and waiters that are cancelled."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import pytest

from helpers.running_server import in_event_loop
from unspool.server.http.admission import Admission
from unspool.server.runtime.threads import compute_pool, run_in


async def settle() -> None:
    """Let every task that can run come to its next wait."""
    for _ in range(10):
        await asyncio.sleep(0)


class Client:
    """A task that holds places until `leave` is called."""

    def __init__(self, admission: Admission, places: int = 1) -> None:
        self.entered = False
        self._leave = asyncio.Event()
        self.task = asyncio.ensure_future(self._use(admission, places))

    async def _use(self, admission: Admission, places: int) -> None:
        async with admission.places(places):
            self.entered = True
            await self._leave.wait()

    async def leave(self) -> None:
        self._leave.set()
        await self.task


@pytest.mark.parametrize("has_turn", [False, True])
@in_event_loop
async def test_a_waiter_cancelled_as_its_turn_comes_ends_as_cancelled(has_turn: bool):
    """A waiter is cancelled between the moment a place becomes free and the moment it wakes up."""
    admission = Admission(1, 10)
    holder, *waiters = [Client(admission) for _ in range(4)]
    await settle()
    assert (admission.running, admission.queued) == (1, 3)
    holder._leave.set()
    if has_turn:
        await asyncio.sleep(0)  # the first waiter has the place, and does not know it yet
    for waiter in waiters[:2]:
        waiter.task.cancel()
    tasks = [client.task for client in (holder, *waiters[:2])]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert outcomes[0] is None
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes[1:])
    await settle()
    assert waiters[2].entered
    await waiters[2].leave()
    assert (admission.running, admission.queued) == (0, 0)


@in_event_loop
async def test_deadlines_in_the_queue_are_timeouts():
    """Every waiter's deadline passes at the moment at which the place becomes free."""
    admission = Admission(1, 100)
    holder = Client(admission)
    await settle()
    due = asyncio.get_running_loop().time() + 0.01

    async def wait_for_place() -> str:
        try:
            async with asyncio.timeout_at(due), admission.places(1):
                return "entered"
        except TimeoutError:
            return "timeout"

    waiters = [asyncio.ensure_future(wait_for_place()) for _ in range(20)]
    asyncio.get_running_loop().call_at(due, holder._leave.set)
    outcomes = await asyncio.gather(*waiters)
    await holder.task
    assert set(outcomes) <= {"entered", "timeout"} and "timeout" in outcomes
    assert (admission.running, admission.queued) == (0, 0)


@in_event_loop
async def test_a_request_of_many_rows_grows_only_while_places_are_free():
    admission = Admission(64, 10)
    async with admission.places(1) as first:
        grown = 1
        while first.grow(1):
            grown += 1
        assert grown == admission.running == 48  # a quarter stays free
        async with admission.places(1) as second:
            assert second.grow(1)  # another one of that kind gets a share
            second.shrink(1)
            clients = [Client(admission) for _ in range(16)]
            await settle()
            assert (admission.running, admission.queued) == (64, 1)
            assert not second.grow(1)
            first.shrink(1)  # a row is finished: the place is for the one that waits
            assert not first.grow(1)
            await settle()
            assert clients[-1].entered
            for client in clients:
                await client.leave()
    assert (admission.running, admission.queued) == (0, 0)


@in_event_loop
async def test_requests_without_places_never_wait():
    admission = Admission(1, 0)
    async with admission.places(1), admission.places(0):
        assert (admission.running, admission.queued) == (1, 0)
    assert admission.running == 0


@in_event_loop
async def test_places_stay_taken_while_a_thread_still_works_for_the_request():
    admission, pool, go_on = Admission(1, 10), compute_pool(1), threading.Event()
    with suppress(TimeoutError):
        async with asyncio.timeout(0.01), admission.places(1) as lease:
            await run_in(pool, lambda: go_on.wait(30), lease=lease)
    assert admission.running == 1
    next_client = Client(admission)
    await settle()
    assert not next_client.entered
    go_on.set()
    while not next_client.entered:
        await asyncio.sleep(0.001)
    await next_client.leave()
    assert admission.running == 0
