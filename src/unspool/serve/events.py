"""Server-sent events: an answer that is sent while it is being written.

The response watches for the client's leaving while it sends. When the client is gone, or the time
is up, the writing behind it is stopped at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from unspool.serve.faults import ApiError, as_api_error
from unspool.serve.json_reply import dumped

_LAST_WORDS = 2.0  # seconds to get an error across when the time is up already
DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str | None = None) -> bytes:
    """One event; `name` where clients tell events apart by it."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + dumped(data) + b"\n\n"


class Frames:
    """Events that are always the same but for one text: made once for each choice, and filled for
    every token. `made` gives the event of a choice's number and a text."""

    _HERE = "\u0001"

    def __init__(self, made: Callable[[int, str], bytes]) -> None:
        self._made = made
        self._known: dict[int, list[bytes]] = {}

    def __call__(self, number: int, text: str) -> bytes:
        if number not in self._known:
            self._known[number] = self._made(number, self._HERE).split(dumped(self._HERE))
        before, after = self._known[number]
        return before + dumped(text) + after


async def gone(receive: Receive) -> None:
    """Comes back when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Events as they come, from an iterator of bytes; each item is sent at once.

    `failed` makes the last event of an error, because the status is sent long before; `left` is
    called in the end, whatever happens.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        until: float,
        failed: Callable[[ApiError], bytes],
        left: Callable[[BaseException | None], Awaitable[None]],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._until, self._failed, self._left = events, until, failed, left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        watching = asyncio.ensure_future(gone(receive))
        why: BaseException | None = None
        try:
            await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                why = sending.result()
            else:
                why = ConnectionResetError("the client has gone")
        except BaseException as error:
            why = error
            raise
        finally:
            for task in (sending, watching):
                task.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)
            await self._left(why)

    async def _send(self, send: Send) -> BaseException | None:
        """Send all events; gives the error that ended them, if one did."""
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        fault: BaseException | None = None
        try:
            async with asyncio.timeout_at(self._until):
                async for piece in self._events:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as error:
            fault = error
        with suppress(TimeoutError):  # a client that does not read must not hold us for ever
            async with asyncio.timeout(_LAST_WORDS if fault else None):
                if fault is not None:
                    last = self._failed(as_api_error(fault))
                    await send({"type": "http.response.body", "body": last, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        return fault
