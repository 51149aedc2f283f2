"""Server-sent events: a response that is sent while it is generated."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from unspool.server.http.errors import ApiError, shutting_down, to_api_error
from unspool.server.http.replies import to_json

WIRE_EXTENSION = "unspool.wire"  # the ASGI extension that makes a wire


class SocketWire:
    """Writes the body of one response, whose head is already sent, to its connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._transport = cycle, cycle.transport
        self._is_chunked = cycle.scope["http_version"] == "1.1"  # as h11 has said in the head
        self._time = asyncio.get_running_loop().time
        self.sent_at = self._time()

    def write(self, piece: bytes) -> None:
        """Send a piece; what the client cannot receive yet is buffered."""
        if not piece or self._cycle.disconnected or self._transport.is_closing():
            return
        self.sent_at = self._time()
        if self._is_chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        self._transport.write(piece)

    @property
    def is_full(self) -> bool:
        """Whether the client reads too slowly to send it more now."""
        return self._cycle.flow.write_paused and not self._cycle.disconnected

    async def drain(self) -> None:
        """Wait until the client has read enough."""
        await self._cycle.flow.drain()

    def close(self) -> None:
        """Drop pieces that are not sent yet. The connection is closed by the server."""


class AsgiWire:
    """The same for other ASGI servers: pieces are sent as ASGI messages."""

    def __init__(self, send: Send) -> None:
        self._send, self._pieces = send, deque[bytes]()
        self._sending: asyncio.Task[None] | None = None
        self._time = asyncio.get_running_loop().time
        self.sent_at = self._time()

    def write(self, piece: bytes) -> None:
        if piece:
            self.sent_at = self._time()
            self._pieces.append(piece)
            if self._sending is None:
                self._sending = asyncio.ensure_future(self._send_pieces())

    @property
    def is_full(self) -> bool:
        return self._sending is not None

    async def drain(self) -> None:
        if self._sending is not None:
            await asyncio.wait((self._sending,))

    def close(self) -> None:
        if self._sending is not None:
            self._sending.cancel()

    async def _send_pieces(self) -> None:
        try:
            while self._pieces:
                body = self._pieces.popleft()
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            self._sending = None


Wire = SocketWire | AsgiWire


_ERROR_SECONDS = 2.0  # to send an error after the deadline has passed
HEARTBEAT_SECONDS = 5.0
_HEARTBEAT = b": still here\n\n"
DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str | None = None) -> bytes:
    """One event, with a name where clients need it."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(data) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that failed, named `error`."""
    return event(error.openai(), "error")


class EventTemplate:
    """Events that differ in one text only: rendered once for each choice, and filled for every
    token. `render` makes the event of a choice index and a text."""

    _PLACEHOLDER = "\u0001"

    def __init__(self, render: Callable[[int, str], bytes]) -> None:
        self._render = render
        self._parts: dict[int, list[bytes]] = {}

    def __call__(self, number: int, text: str) -> bytes:
        if number not in self._parts:
            rendered = self._render(number, self._PLACEHOLDER)
            self._parts[number] = rendered.split(to_json(self._PLACEHOLDER))
        before, after = self._parts[number]
        return before + to_json(text) + after


Writer = Callable[[Wire], Awaitable[None]]


def writer_from(pieces: AsyncGenerator[bytes, None]) -> Writer:
    """A writer that sends the pieces of a generator."""

    async def write(wire: Wire) -> None:
        async with aclosing(pieces):
            async for piece in pieces:
                if wire.is_full:
                    await wire.drain()
                wire.write(piece)

    return write


class EventStream(Response):
    """A response of server-sent events, or of JSON lines.

    While there are no events, a comment is sent every few seconds, so that proxies keep the
    connection open. JSON lines have no comments.

    Args:
        write: Puts events on the wire as they occur.
        until: Deadline, in seconds of the event loop's clock.
        failed: Makes the last event of a failed response, whose status is already sent. A server
            that shuts down cancels its streams, and sends this event too.
        is_lines: JSON lines instead of events.
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
        wire: Wire = scope.get("extensions", {}).get(WIRE_EXTENSION, AsgiWire)(send)
        heartbeat = asyncio.ensure_future(self._send_heartbeats(wire))
        try:
            fault = await self._send_events(wire)
        except asyncio.CancelledError:
            if not scope["state"]["admission"].is_stopping:  # the client has disconnected
                wire.close()
                raise
            fault = shutting_down()
        finally:
            heartbeat.cancel()
        with suppress(TimeoutError):  # the client may not be reading
            async with asyncio.timeout(_ERROR_SECONDS if fault else None):
                await wire.drain()
                if fault is not None:
                    scope["state"]["log"]["error"] = str(fault)
                    last = self._failed(to_api_error(fault))
                    await send({"type": "http.response.body", "body": last, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, wire: Wire) -> Exception | None:
        """Send all events. Returns the error that ended them, if any."""
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
                wire.write(_HEARTBEAT)
