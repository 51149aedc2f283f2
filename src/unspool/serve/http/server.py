"""Running the server: listen, serve, and stop in good order.

SIGTERM refuses new work, lets what runs finish (up to a deadline), and ends with 0; a second one
ends at once. Ctrl-C is the same, but whoever pressed it waits: what runs has a second. While the
first model is still loading there is nothing to finish, and both end the process where it stands.
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

from unspool.serve.http.listening import NO_RESOURCES
from unspool.serve.http.logs import log_event
from unspool.serve.http.settings import ServeSettings
from unspool.serve.http.wire import NAME as WIRE
from unspool.serve.http.wire import SocketWire

# A thread that computes gives Python up to others at least this often: at the usual 5 ms an
# answer that is ready would wait for the next one to be picked.
_SWITCH_SECONDS = 0.0005

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# That what runs has to finish after Ctrl-C.
_INTERRUPT_SECONDS = 1.0

_ACCEPT_LOG_SECONDS = 60.0

# For a client to finish a body that was answered before all of it came; then it is cut off.
_LINGER_SECONDS = 2.0


class _Protocol(H11Protocol):
    """HTTP, but not for a client that never says what it wants, or never stops saying it, or never
    reads what it is sent."""

    head_seconds = 30.0
    write_seconds = 60.0
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._served, self.app = self.app, self._serve

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """The application, which may write the body of its answer straight to the socket."""
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
        self.transport.abort()  # which ends the request as if the client had left

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _expect_request(self, seconds: float | None) -> None:
        """Hang up unless there is a new request by then; None: no hurry."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, self._hang_up_unless_new, self.cycle)

    def _hang_up_unless_new(self, before: RequestResponseCycle | None) -> None:
        self._timer = None
        if self.cycle is before and not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn, told when to stop and what to tell."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServeSettings,
        *,
        stopping: Callable[[], None],
        started: Callable[[str], bool],
    ) -> None:
        seconds = {
            "head_seconds": settings.body_seconds,
            "write_seconds": settings.write_seconds,
        }
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
        self._stopping, self._on_started = stopping, started
        self._drain = settings.drain
        self._hurry = asyncio.Event()  # set: what runs is to end now
        self._accept_logged_at = -math.inf

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            if not self._on_started(address):  # a signal that comes meanwhile is not forgotten
                self.should_exit = True

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log errors of the event loop; once a minute if connections cannot be accepted, which is
        tried again every second."""
        error = context.get("exception")
        if self.should_exit and "_start_serving" in context["message"]:
            return  # such a retry, and the socket is closed
        if not isinstance(error, OSError) or error.errno not in NO_RESOURCES:
            loop.default_exception_handler(context)
        elif loop.time() >= self._accept_logged_at + _ACCEPT_LOG_SECONDS:
            self._accept_logged_at = loop.time()
            advice = "raise the limit of open files (ulimit -n), or send fewer requests at once"
            log_event("accept_failed", logging.ERROR, error=str(error), advice=advice)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, which raises them once more when it has stopped."""
        if threading.current_thread() is not threading.main_thread():
            yield  # whoever has begun the thread calls `stop`
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in _SIGNALS}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.started:  # a thread that loads cannot be stopped otherwise
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
        """Take nothing new, let what runs finish, and end; from any thread."""
        self._stopping()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cutting = asyncio.ensure_future(self._end_requests())
        await super().shutdown(sockets)
        cutting.cancel()

    async def _end_requests(self) -> None:
        """When their time is up, cancel them: each tells its client so (see `Middleware`)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain):
                await self._hurry.wait()
        for task in list(self.server_state.tasks):
            task.cancel()


def run(
    app: ASGIApp,
    settings: ServeSettings,
    bound: socket.socket,
    *,
    stopping: Callable[[], None],
    started: Callable[[str], bool],
) -> None:
    """Serve until told to stop, or until `started` says that it is not worth it."""
    run_server(Server(app, settings, stopping=stopping, started=started), bound)


def run_server(server: Server, bound: socket.socket) -> None:
    """Serve until the server is told to stop; on the main thread a signal tells it too."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # series that nobody reads
    asyncio.run(server.serve([bound]))
    log_event("stopped")
