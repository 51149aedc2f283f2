"""Cancel the work of a request when its client disconnects."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType

from starlette.types import Receive


class CancelOnDisconnect:
    """Context manager that is cancelled when the client disconnects, and then raises
    ConnectionResetError.

    Like `asyncio.timeout`: the body runs in the task that entered, is interrupted where it awaits,
    and every inner context manager exits normally.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancels_before = task, task.cancelling()
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self._task.cancel()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watching.cancel()
        if not self._is_gone:
            return
        with suppress(asyncio.CancelledError):  # this one, if the body ended first
            await asyncio.sleep(0)
        if self._task.uncancel() > self._cancels_before:  # the task was cancelled from outside too
            raise asyncio.CancelledError
        if kind is asyncio.CancelledError:
            raise ConnectionResetError("the client has disconnected")
