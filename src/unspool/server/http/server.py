"""Run the server with uvicorn, and shut it down gracefully.

SIGTERM rejects new requests, lets running ones finish (up to a deadline), and exits with 0; a
second one exits immediately. Ctrl-C does the same, but running requests have one second. While the
first model is loading there is nothing to finish, and both exit immediately.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import h11
import uvicorn
from prometheus_client import disable_created_metrics
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from unspool.server.http.events import WIRE_EXTENSION as WIRE
from unspool.server.http.events import SocketWire
from unspool.server.http.logs import log_event
from unspool.server.http.settings import ServerSettings
from unspool.server.http.sockets import NO_RESOURCES

_SWITCH_SECONDS = 0.0005

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_INTERRUPT_SECONDS = 1.0  # for running requests to finish after Ctrl-C

_ACCEPT_LOG_SECONDS = 60.0

# For a client to finish sending a body that is already answered; then it is disconnected.
_LINGER_SECONDS = 2.0


class _Protocol(H11Protocol):
    """HTTP/1.1 with time limits for clients that do not send requests or do not read responses."""

    head_seconds = 30.0
    write_seconds = 60.0
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._served, self.app = self.app, self._serve

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """Call the application, and let it write response bodies directly to the connection."""
        scope["extensions"] = {WIRE: lambda send: SocketWire(self.cycle)}
        await self._served(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request(self.head_seconds)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._timer is None and self.cycle is not None and self.cycle.response_complete:
            self._expect_request(self.head_seconds)  # a part of the next request's head

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request(_LINGER_SECONDS if self.conn.their_state is h11.SEND_BODY else None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_write_timer()
        super().connection_lost(exc)

    def _expect_reading(self) -> None:
        """Drop the connection unless the client reads something within `write_seconds`."""
        unsent_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(
            self.write_seconds, self._drop_unless_read, unsent_bytes
        )

    def _drop_unless_read(self, unsent_bytes: int) -> None:
        if self.transport.get_write_buffer_size() < unsent_bytes:
            self._expect_reading()
            return
        log_event("write_timeout", logging.WARNING, unsent_bytes=unsent_bytes)
        self.transport.abort()  # ends the request as if the client had disconnected

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _expect_request(self, seconds: float | None) -> None:
        """Close the connection unless a new request begins in time; None: no limit."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, self._close_unless_new, self.cycle)

    def _close_unless_new(self, before: RequestResponseCycle | None) -> None:
        self._timer = None
        if self.cycle is before and not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn with graceful shutdown, and callbacks for start and stop.

    `started` gets the address; if it returns False the server exits.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        *,
        on_stopping: Callable[[], None],
        on_started: Callable[[str], bool],
    ) -> None:
        seconds = {"head_seconds": settings.body_seconds, "write_seconds": settings.write_seconds}
        protocol = type("Protocol", (_Protocol,), seconds)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                host=settings.host,
                port=settings.port,
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                lifespan="on",
                ws="none",
                timeout_keep_alive=30,
                h11_max_incomplete_event_size=64 << 10,
            )
        )
        self._stopping, self._on_started = on_stopping, on_started
        self._drain = settings.drain
        self._hurry = asyncio.Event()  # set: running requests are to end now
        self._accept_logged_at = -math.inf

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            if not self._on_started(address):  # keeps an exit that a signal has requested
                self.should_exit = True

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log errors of the event loop; failures to accept connections once a minute only, as
        asyncio retries every second."""
        error = context.get("exception")
        if self.should_exit and "_start_serving" in context["message"]:
            return  # a retry after the socket was closed
        if not isinstance(error, OSError) or error.errno not in NO_RESOURCES:
            loop.default_exception_handler(context)
        elif loop.time() >= self._accept_logged_at + _ACCEPT_LOG_SECONDS:
            self._accept_logged_at = loop.time()
            advice = "raise the limit of open files (ulimit -n), or send fewer parallel requests"
            log_event("accept_failed", logging.ERROR, error=str(error), advice=advice)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As in uvicorn, but without raising the signals again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield  # the creator of the thread calls `stop`
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in _SIGNALS}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.started:  # a loading thread cannot be interrupted otherwise
            os._exit(128 + sig)
        if self._hurry.is_set():
            os._exit(128 + sig)
        if self.should_exit:
            self._hurry.set()
            return
        if sig == signal.SIGINT:
            self._drain = min(self._drain, _INTERRUPT_SECONDS)
        self.stop()

    def stop(self) -> None:
        """Reject new requests, let running ones finish, and exit. Thread-safe."""
        self._stopping()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cutting = asyncio.ensure_future(self._end_requests())
        await super().shutdown(sockets)
        cutting.cancel()

    async def _end_requests(self) -> None:
        """Cancel requests when the drain time is over; `Middleware` then sends an error."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain):
                await self._hurry.wait()
        for task in list(self.server_state.tasks):
            task.cancel()


def run(
    app: ASGIApp,
    settings: ServerSettings,
    bound: socket.socket,
    *,
    on_stopping: Callable[[], None],
    on_started: Callable[[str], bool],
) -> None:
    """Serve until a signal, or until `started` returns False."""
    run_server(Server(app, settings, on_stopping=on_stopping, on_started=on_started), bound)


def run_server(server: Server, bound: socket.socket) -> None:
    """Serve until `stop` is called, or, on the main thread, until a signal."""
    _shorten_switch_interval()
    disable_created_metrics()  # type: ignore[no-untyped-call]  # unused series
    asyncio.run(server.serve([bound]))
    log_event("stopped")


def _shorten_switch_interval() -> None:
    """Let the event loop interrupt a computing thread after 0.5 ms instead of Python's 5 ms.

    At 5 ms events wait for the engine thread. 128 streams, `bench/serve.py --device null`, two
    rounds on two shared cores: 2,250 and 2,300 tokens/s with 5 ms, 4,280 and 3,080 with 0.5 ms; the
    first token after 1.2 and 2.0 s instead of 0.6 and 0.8 s.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
