"""Middleware around every request: access checks before, log and metrics after.

Checks the key, host, origin, size of the body and time to send it. Plain ASGI, so that streams
pass through unbuffered.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from contextlib import AsyncExitStack, suppress
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unspool.page.files import PREFIX
from unspool.server.http.admission import Admission
from unspool.server.http.errors import ApiError, shutting_down, to_api_error
from unspool.server.http.logs import log_event
from unspool.server.http.replies import error_reply, note_headers
from unspool.server.http.settings import ServerSettings


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


# No key needed: health checks, and pages that ask the user for the key.
OPEN_PATHS = ("/health", "/v1/health", "/ready", "/docs", "/", "/favicon.ico")
# Polled every few seconds.
_UNLOGGED = ("/health", "/v1/health", "/ready", "/metrics")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # they change nothing
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
ROUTE_HEADER = "x-unspool-route"  # header for the gateway: the route that has answered


class RequestMetrics(Protocol):
    """Metrics of requests."""

    requests: Any  # by path and status
    seconds: Any  # by path
    cancelled: Any  # by path


class MiddlewareState(Protocol):
    """State that the middleware needs: of a server, or of a gateway to several."""

    @property
    def settings(self) -> ServerSettings: ...
    @property
    def admission(self) -> Admission: ...
    @property
    def metrics(self) -> RequestMetrics: ...


class Middleware:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, state: MiddlewareState) -> None:
        self.app, self.state = app, state
        self.keys = [key.encode() for key in state.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = perf_counter()
        identity = "req_" + secrets.token_hex(8)
        scope.setdefault("state", {})
        scope["state"].update(
            arrived=began, log={}, id=identity, user="", admission=self.state.admission
        )
        answer = _ResponseSender(send, scope, names_route=bool(self.state.settings.replica))
        try:
            async with AsyncExitStack() as resources:  # released when the request ends
                scope["state"]["resources"] = resources
                self._check(scope)
                await self.app(scope, self._bounded(scope, receive), answer.send)
        except ConnectionResetError:
            scope["state"]["log"]["gone"] = True
        except asyncio.CancelledError:
            if not self.state.admission.is_stopping:
                raise
            # Shutting down, and the drain time has passed.
            await self._fail(scope, receive, answer, shutting_down())
        except Exception as error:
            await self._fail(scope, receive, answer, error)
        finally:
            self._account(scope, answer.status, perf_counter() - began)

    async def _fail(
        self, scope: Scope, receive: Receive, answer: _ResponseSender, error: Exception
    ) -> None:
        api_error = to_api_error(error)
        if api_error.status >= 500 and api_error.status not in (503, 504):
            log_event("error", logging.ERROR, exc_info=error, id=scope["state"]["id"])
        if answer.status is None:
            if api_error.status == 408:  # the rest of the body may never arrive
                api_error.headers = {**(api_error.headers or {}), "connection": "close"}
            scope["state"]["log"]["error"] = api_error.message
            await error_reply(api_error, scope["path"])(scope, receive, answer.send)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        self._check_host(headers)
        if scope["method"] not in _SAFE_METHODS:
            self._check_origin(headers)
        if self.keys and not _is_open(scope["path"]) and scope["method"] != "OPTIONS":
            scope["state"]["user"] = self._check_key(headers)
        size = headers.get(b"content-length", b"0")
        if not size.isdigit() or int(size[:20]) > self.state.settings.max_body:
            raise self._too_large()

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Reject DNS rebinding: a web page whose host name resolves to this machine could reach a
        server that listens locally. Its requests still carry that name."""
        if not self.state.settings.is_local or self.keys:
            return
        host = headers.get(b"host", b"localhost").decode("latin-1").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in _LOCAL and name != self.state.settings.host:
            raise ApiError(403, f"this server answers to localhost, not to {name[:100]!r}")

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        """Reject cross-site requests that browsers send without a CORS preflight.

        Any page may send forms, plain text and empty bodies to any host; the browser names the
        page's origin. JSON is only sent where the server allows it. Other programs send no origin.
        """
        origin = headers.get(b"origin")
        site = headers.get(b"sec-fetch-site", b"same-origin" if origin is None else b"")
        if site in (b"same-origin", b"none") or _is_json(headers.get(b"content-type", b"")):
            return
        name = (origin or b"").decode("latin-1")
        host = headers.get(b"host", b"").decode("latin-1")
        if host and name.partition("://")[2].lower() == host.lower():
            return
        origins = self.state.settings.cors
        if "*" in origins or name in origins:
            return
        raise ApiError(
            403,
            f"a page of another origin ({name[:100] or 'not named'}) must send application/json, "
            "or be allowed with --cors",
            code="foreign_origin",
        )

    def _check_key(self, headers: dict[bytes, bytes]) -> str:
        """The user that the key belongs to. Stored objects are visible to their user only."""
        key = headers.get(b"x-api-key", b"")  # Anthropic's clients
        kind, _, value = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"bearer":
            key = value.strip()
        # All keys are compared, each in constant time.
        matches = [hmac.compare_digest(key, allowed_key) for allowed_key in self.keys]
        if not any(matches):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        # The same after a restart with the keys in another order.
        return f"key-{hashlib.sha256(key).hexdigest()[:24]}"

    def _too_large(self) -> ApiError:
        limit = self.state.settings.max_body
        return ApiError(413, f"the request body is larger than {limit:,} bytes")

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """`receive` with limits on the size of the body and the time to send it."""
        settings = self.state.settings
        received, is_complete = 0, False
        until = asyncio.get_running_loop().time() + settings.body_seconds

        async def bounded() -> Message:
            nonlocal received, is_complete
            if is_complete:
                return await receive()
            try:
                # Not wait_for: in Python 3.11 it may swallow a cancellation.
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, "the request body did not arrive in time") from None
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
                if received > settings.max_body:
                    raise self._too_large()
            return message

        return bounded

    def _account(self, scope: Scope, status: int | None, seconds: float) -> None:
        log: dict[str, Any] = scope["state"]["log"]
        is_gone = bool(log.get("gone"))
        path = _route_path(scope) or "other"  # a template: labels must be bounded
        metrics = self.state.metrics
        metrics.requests.labels(path, str(status or 499)).inc()
        metrics.seconds.labels(path).observe(seconds)
        if is_gone:
            metrics.cancelled.labels(path).inc()
        if scope["path"] in _UNLOGGED or (
            scope["path"].startswith(PREFIX) and status in (200, 304)
        ):
            return
        client = scope.get("client")
        log_event(
            "request",
            id=scope["state"]["id"],
            method=scope["method"],
            path=scope["path"][:200],
            status=status or 499,
            seconds=round(seconds, 4),
            client=client[0] if client else None,
            **log,
        )


def _is_json(content_type: bytes) -> bool:
    kind, _, subtype = content_type.partition(b";")[0].strip().lower().partition(b"/")
    return kind == b"application" and (subtype == b"json" or subtype.endswith(b"+json"))


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(PREFIX)


def _route_path(scope: Scope) -> str | None:
    """The template of the matched route, such as `/v1/tree/{identity}`."""
    return getattr(scope.get("route"), "path", None)


class _ResponseSender:
    """`send` that records the status, and adds the headers of the middleware."""

    def __init__(self, send: Send, scope: Scope, *, names_route: bool) -> None:
        self._send, self._scope, self._names_route = send, scope, names_route
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            state = self._scope["state"]
            headers = [(b"x-request-id", state["id"].encode()), *note_headers(state["log"])]
            if self._names_route and (path := _route_path(self._scope)):
                headers.append((ROUTE_HEADER.encode(), path.encode()))
            message["headers"] = [*message["headers"], *headers]
        await self._send(message)
