"""A client that hangs up ends the work that is done for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType

from starlette.types import Receive


class CancelOnDisconnect:
    """A context that is cancelled when the client hangs up, and raises ConnectionResetError then.

    As `asyncio.timeout` does with a clock: the work runs in the task that entered, so that it is
    interrupted at whatever it awaits, and every context inside is left in order.
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
        with suppress(asyncio.CancelledError):  # ours, if it came too late to interrupt anything
            await asyncio.sleep(0)
        if self._task.uncancel() > self._cancels_before:  # somebody else has cancelled the task
            raise asyncio.CancelledError
        if kind is asyncio.CancelledError:
            raise ConnectionResetError("the client has gone")
