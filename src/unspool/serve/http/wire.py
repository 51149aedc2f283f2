"""Writers for the body of a streamed response.

`SocketWire` writes pieces directly to the connection: sent as ASGI messages, each piece would pass
half a dozen coroutines and h11's state machine, which is most of the work for hundreds of streams
with a piece every few milliseconds. Head and end of the response are still sent by ASGI.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

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
