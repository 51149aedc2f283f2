"""What must not hold up the event loop (loading, tokenizing, compiling a grammar) goes to a thread.

A pool of its own, and not asyncio's: its size bounds how much of this goes on at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, Generic, Self, TypeVar, cast

Result = TypeVar("Result")
Item = TypeVar("Item")

_pool = ThreadPoolExecutor(32, thread_name_prefix="unspool-serve")


async def in_thread(work: Callable[..., Result], *given: Any, **named: Any) -> Result:
    """Have this done on a thread. Who is cancelled meanwhile leaves it to finish unheard."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_pool, partial(work, *given, **named))


class Worker(Generic[Item]):
    """An iterator whose items are made on a thread, one when it is asked for. A context: who leaves
    it ends the work after the item that is being made, and waits for that."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items: Iterator[Item] | None = items
        self._busy = Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.shield(in_thread(self._close))

    async def __aiter__(self) -> AsyncIterator[Item]:
        while (item := await in_thread(self._next)) is not _END:
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
