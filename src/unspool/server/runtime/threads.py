"""Thread pools for blocking work. One bounded pool for each kind, so that none starves another.

PREPARING   tokenizing, templates, JSON: short, and never waits for the engine
a server's  engine work of admitted requests: as many threads as there are places, so that an
`compute`   admitted request never waits for a thread

Models are loaded on the registry's own threads, and routes are imported on a thread of the app.

Work is cancelled with the task that awaits it: it does not start if it is still queued, and its
waits in the engine end with an error (`WorkScope`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, Generic, Self, TypeVar, cast

from unspool.engine.work_scope import WorkScope
from unspool.server.http.admission import Lease

Result = TypeVar("Result")
Item = TypeVar("Item")
Runner = Callable[..., Awaitable[Any]]  # (work, *arguments, **named arguments)

PREPARING = ThreadPoolExecutor(16, thread_name_prefix="unspool-prepare")


def compute_pool(places: int) -> ThreadPoolExecutor:
    """Threads for the engine work of a server with this many places."""
    return ThreadPoolExecutor(places, thread_name_prefix="unspool-compute")


async def in_thread(work: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
    """Run short work on a thread of `PREPARING`."""
    return await run_in(PREPARING, partial(work, *arguments, **named))


async def run_in(
    pool: ThreadPoolExecutor,
    work: Callable[[], Result],
    *,
    group: object = None,
    lease: Lease | None = None,
) -> Result:
    """Run work on a thread of a pool; cancelled with the task that awaits it.

    Args:
        group: The request it belongs to; its rows take turns with rows of other requests.
        lease: Places that stay occupied until the thread has ended.
    """
    scope, loop = WorkScope(group), asyncio.get_running_loop()

    def run() -> Result:
        with scope.active():
            return work()

    future = pool.submit(run)
    if lease is not None:
        lease.retain()

        def release(_: object) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(lease.release)

        future.add_done_callback(release)  # before the task is woken
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        scope.cancel()
        raise


class Worker(Generic[Item]):
    """Async iterator over an iterator that runs on threads, one item at a time.

    A context manager: exiting closes the iterator and waits for that. An item that is being
    computed is cancelled with the task that awaits it.
    """

    def __init__(self, items: Iterator[Item], run: Runner = in_thread) -> None:
        """`run` runs a function on a thread, such as `Call.run`."""
        self._items: Iterator[Item] | None = items
        self._run = run
        self._busy = Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.shield(self._run(self._close))

    async def __aiter__(self) -> AsyncIterator[Item]:
        while (item := await self._run(self._next)) is not _END:
            yield cast(Item, item)

    def _next(self) -> object:
        with self._busy:
            return _END if self._items is None else next(self._items, _END)

    def _close(self) -> None:
        with self._busy:
            close = getattr(self._items, "close", None)
            self._items = None
            if close is not None:
                close()


_END = object()
