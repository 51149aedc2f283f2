"""Server-sent events: an answer that is sent while it is being written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from unspool.serve.http.errors import ApiError, shutting_down, to_api_error
from unspool.serve.http.routes import to_json
from unspool.serve.http.wire import NAME, Relay, Wire

_ERROR_SECONDS = 2.0  # seconds to get an error across when the time is up already
HEARTBEAT_SECONDS = 5.0
_COMMENT = b": still here\n\n"
DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str | None = None) -> bytes:
    """One event; `name` where clients tell events apart by it."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(data) + b"\n\n"


class EventTemplate:
    """Events that are always the same but for one text: made once for each choice, and filled for
    every token. `made` gives the event of a choice's number and a text."""

    _HERE = "\u0001"

    def __init__(self, render: Callable[[int, str], bytes]) -> None:
        self._render = render
        self._known: dict[int, list[bytes]] = {}

    def __call__(self, number: int, text: str) -> bytes:
        if number not in self._known:
            self._known[number] = self._render(number, self._HERE).split(to_json(self._HERE))
        before, after = self._known[number]
        return before + to_json(text) + after


Writer = Callable[[Wire], Awaitable[None]]


def pouring(pieces: AsyncGenerator[bytes, None]) -> Writer:
    """A writer of pieces that somebody else makes."""

    async def write(wire: Wire) -> None:
        async with aclosing(pieces) as found:
            async for piece in found:
                if wire.is_full:
                    await wire.drain()
                wire.put(piece)

    return write


class EventStream(Response):
    """Events as they come: `write` puts them on the wire, each at once.

    While nothing comes, a comment is sent every few seconds: proxies and people see that the
    answer is still being worked on. `failed` makes the last event of an error, because the status
    is sent long before. A server that stops cancels its streams, and says so in that event too.
    Lines of JSON (`is_lines`) know no comments, so that there are none.
    """

    def __init__(
        self,
        write: Writer,
        *,
        until: float | None,
        failed: Callable[[ApiError], bytes],
        is_lines: bool = False,
    ) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
            media_type="application/x-ndjson" if is_lines else "text/event-stream",
        )
        del self.headers["content-length"]
        self._write, self._until, self._failed = write, until, failed
        self._is_lines = is_lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        wire: Wire = scope.get("extensions", {}).get(NAME, Relay)(send)
        heartbeat = asyncio.ensure_future(self._send_heartbeats(wire))
        try:
            fault = await self._send_events(wire)
        except asyncio.CancelledError:
            if not scope["app"].state.server.admission.refusing:  # then the client has gone
                wire.close()
                raise
            fault = shutting_down()
        finally:
            heartbeat.cancel()
        with suppress(TimeoutError):  # a client that does not read must not hold us for ever
            async with asyncio.timeout(_ERROR_SECONDS if fault else None):
                await wire.drain()
                if fault is not None:
                    scope["state"]["log"]["error"] = str(fault)
                    last = self._failed(to_api_error(fault))
                    await send({"type": "http.response.body", "body": last, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, wire: Wire) -> Exception | None:
        """Send all events; gives the error that ended them, if one did."""
        try:
            async with asyncio.timeout_at(self._until):
                await self._write(wire)
        except Exception as error:
            return error
        return None

    async def _send_heartbeats(self, wire: Wire) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_lines:
            await asyncio.sleep(wire.sent_at + HEARTBEAT_SECONDS - loop.time())
            if loop.time() >= wire.sent_at + HEARTBEAT_SECONDS:
                if wire.is_full:
                    await wire.drain()
                wire.put(_COMMENT)
