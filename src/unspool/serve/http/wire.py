"""The pieces of a stream, straight to the client's socket.

A piece that is sent as ASGI has it passes half a dozen coroutines and the state machine of HTTP,
and at the socket Python's lock is let go, which the engine's thread then holds for a while: for
hundreds of streams with a piece each a few milliseconds, that is most of the work. What stands
before and behind the pieces, and pieces for a client that does not keep up, go the usual way.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import sys
from collections import deque
from collections.abc import Callable

from starlette.types import Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

NAME = "unspool.wire"  # among a request's extensions


class SocketWire:
    """The body of one answer, whose head is sent already."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._transport = cycle, cycle.transport
        self._is_chunked = cycle.scope["http_version"] == "1.1"  # as h11 has said in the head
        bound: socket.socket | None = self._transport.get_extra_info("socket")
        self._number = -1 if bound is None else bound.fileno()
        self._time = asyncio.get_running_loop().time
        self.sent_at = self._time()

    def put(self, piece: bytes) -> None:
        """Send this; what the client does not take at once is kept for it."""
        if not piece or self._cycle.disconnected or self._transport.is_closing():
            return  # its number may be another client's soon
        self.sent_at = self._time()
        if self._is_chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        transport = self._transport
        if _send is not None and not transport.get_write_buffer_size():
            sent = _send(self._number, piece, len(piece), _FLAGS)
            if sent == len(piece):
                return
            piece = piece[max(0, sent) :]  # the transport finds out what is wrong, if something is
        transport.write(piece)

    @property
    def is_full(self) -> bool:
        """Whether the client lags so far behind that there should be nothing more for now."""
        return self._cycle.flow.write_paused and not self._cycle.disconnected

    async def drain(self) -> None:
        """Wait until the client has caught up."""
        await self._cycle.flow.drain()

    def close(self) -> None:
        """Nothing more is to be sent, nor what is still on its way."""


class Relay:
    """The same where another server runs the application: pieces go the way that ASGI has."""

    def __init__(self, send: Send) -> None:
        self._send, self._pieces = send, deque[bytes]()
        self._sending: asyncio.Task[None] | None = None
        self._time = asyncio.get_running_loop().time
        self.sent_at = self._time()

    def put(self, piece: bytes) -> None:
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


Wire = SocketWire | Relay


def _sender() -> Callable[[int, bytes, int, int], int] | None:
    """The system's `send`, called without letting go of Python's lock: the sockets do not block."""
    if sys.platform not in ("linux", "darwin"):
        return None
    found = ctypes.PyDLL(None).send
    found.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
    found.restype = ctypes.c_ssize_t
    return found


_send = _sender()
# A client that has gone must not end the process by a signal.
_FLAGS = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)
