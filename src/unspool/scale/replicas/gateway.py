"""The gateway: reads a request, chooses a replica, and forwards request and response.

Ray supervises the replicas; the bytes go by plain HTTP from here to the replica's server. (Ray's
proxy takes a millisecond of CPU time per chunk of a stream, the gateway about 40 µs.) So everything
that a server supports also works through a gateway.

A replica may be lost at any time. A request without a response yet is retried once on another
replica; a stream ends with an error that says to retry; an object that only the lost replica had is
gone (410).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from unspool.scale.replicas.asking import RouteHints, read_hints
from unspool.scale.replicas.errors import (
    ReplicaLostError,
    last_event,
    no_replica,
    replica_gone,
    replica_lost,
)
from unspool.scale.replicas.gateway_metrics import GatewayMetrics
from unspool.scale.replicas.gathering import merge_branches, merge_metrics
from unspool.scale.replicas.pool import ReplicaPool, Target
from unspool.serve.http.admission import Admission
from unspool.serve.http.app import with_cors
from unspool.serve.http.disconnect import CancelOnDisconnect
from unspool.serve.http.errors import STOPPING_HEADER, ApiError, shutting_down
from unspool.serve.http.middleware import ROUTE_HEADER, Middleware
from unspool.serve.http.routes import JsonReply
from unspool.serve.http.settings import ServerSettings
from unspool.serve.http.wire import WIRE_EXTENSION, AsgiWire, Wire

ForwardResult = Literal["answered", "stopping", "broken"]

_ATTEMPTS = 2
_CONNECT_SECONDS = 5.0
# Headers of the connection, and headers that the gateway sets itself: not forwarded.
_HOP_HEADERS = {
    "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "x-request-id",
    "content-length", "date", "server", "expect", ROUTE_HEADER,
    "origin", "sec-fetch-site",  # the gateway has already checked these for CORS
}  # fmt: skip
_STREAMS = ("text/event-stream", "application/x-ndjson")
_BROKEN = (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError)


class Gateway:
    """An ASGI application in front of replicas."""

    def __init__(self, settings: ServerSettings, pool: ReplicaPool) -> None:
        self.settings, self.pool = settings, pool
        self.admission = Admission(1, 0)  # only `refusing` is used, for shutdown
        self.metrics = GatewayMetrics(lambda: pool.in_flight)
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if handler := self._local_handler(scope["method"], scope["path"]):
            scope["route"] = _Route(scope["path"])
            await (await handler(scope))(scope, receive, send)
        else:
            await self._forward(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "lifespan.startup"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        # Close idle connections before the replica's server does so, after 30 seconds.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=10)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as self._session:
            await send({"type": "lifespan.startup.complete"})
            assert (await receive())["type"] == "lifespan.shutdown"
        await send({"type": "lifespan.shutdown.complete"})

    # -- answered by the gateway -----------------------------------------------------------------

    def _local_handler(self, method: str, path: str) -> Callable[[Scope], Any] | None:
        if method == "GET":
            return {"/health": self._health, "/ready": self._ready, "/metrics": self._metrics}.get(
                path
            ) or (self._branches if path == "/v1/tree" else None)
        return None

    async def _health(self, _: Scope) -> Response:
        return JsonReply({"status": "ok"})

    async def _ready(self, _: Scope) -> Response:
        replicas = await self.pool.all()
        if self.admission.is_stopping or not replicas:
            raise no_replica()
        return JsonReply({"status": "ready", "replicas": sorted(replicas)})

    async def _metrics(self, scope: Scope) -> Response:
        texts = await self._from_all("/metrics", scope)
        content = self.metrics.text() + merge_metrics(texts)
        return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _branches(self, scope: Scope) -> Response:
        return JsonReply(merge_branches(list((await self._from_all("/v1/tree", scope)).values())))

    async def _from_all(self, path: str, scope: Scope) -> dict[str, bytes]:
        """Return the responses of all replicas to a GET with the client's key.

        Replicas that do not answer are left out.
        """
        assert self._session is not None
        session = self._session
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name in (b"x-api-key", b"authorization")
        ]

        async def ask(address: str) -> bytes | None:
            url = f"http://{address}{path}"
            try:
                async with asyncio.timeout(10), session.get(url, headers=headers) as reply:
                    return await reply.read() if reply.status == 200 else None
            except (*_BROKEN, TimeoutError):
                return None

        replicas = await self.pool.all()
        texts = await asyncio.gather(*map(ask, replicas.values()))
        return {name: text for name, text in zip(replicas, texts, strict=True) if text is not None}

    # -- forwarded to a replica ------------------------------------------------------------------

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _body(receive)
        hints = read_hints(scope["method"], scope["path"], dict(scope["headers"]), body)
        async with CancelOnDisconnect(receive):  # also closes the connection to the replica
            for attempt in range(_ATTEMPTS):
                target = await self._choose(scope, hints)
                scope["state"]["log"]["replica"] = target.name
                self.metrics.routed.labels(hints.kind).inc()
                with self.pool.count_in_flight(target):
                    result = await self._send_to(scope, target, body, send)
                if result == "answered":
                    return
                self.pool.avoid(target)
                hints.avoid.add(target.name)
                if hints.kind == "kept":
                    is_gone = result == "stopping" or not await _listens(target)
                    raise replica_gone(scope["path"]) if is_gone else replica_lost()
                if attempt + 1 < _ATTEMPTS:
                    self.metrics.retries.inc()
            raise replica_lost()

    async def _choose(self, scope: Scope, hints: RouteHints) -> Target:
        try:
            return await self.pool.choose(hints)
        except ReplicaLostError:
            raise replica_gone(scope["path"]) from None

    async def _send_to(
        self, scope: Scope, target: Target, body: bytes, send: Send
    ) -> ForwardResult:
        """Send a request to a replica; if it is not "answered", the client received nothing yet."""
        assert self._session is not None
        query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
        url = URL(f"http://{target.address}{path}{query}", encoded=True)
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name.decode("latin-1") not in _HOP_HEADERS
        ]
        try:
            async with self._session.request(
                scope["method"],
                url,
                data=body or None,
                headers=headers,
                allow_redirects=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            ) as reply:
                if STOPPING_HEADER in reply.headers:
                    return "stopping"
                if ROUTE_HEADER in reply.headers:
                    scope["route"] = _Route(reply.headers[ROUTE_HEADER])
                first = await (reply.content.readany() if _is_stream(reply) else reply.read())
                await send(_start(reply, target))
                if _is_stream(reply):
                    await self._stream(scope, reply, first, send)
                else:
                    await send({"type": "http.response.body", "body": first})
                return "answered"
        except _BROKEN:
            return "broken"

    async def _stream(
        self, scope: Scope, reply: aiohttp.ClientResponse, first: bytes, send: Send
    ) -> None:
        """Forward the chunks of a stream as they arrive."""
        wire: Wire = scope.get("extensions", {}).get(WIRE_EXTENSION, AsgiWire)(send)
        piece, last = first, b""
        try:
            while piece:
                if wire.is_full:
                    await wire.drain()
                wire.write(piece)
                piece = await reply.content.readany()
        except _BROKEN:
            self.metrics.broken.inc()
            last = self._last_event(scope, reply, replica_lost())
        except asyncio.CancelledError:
            if not self.admission.is_stopping:  # the client has disconnected
                wire.close()
                raise
            last = self._last_event(scope, reply, shutting_down())
        await wire.drain()
        if last:
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _last_event(self, scope: Scope, reply: aiohttp.ClientResponse, error: ApiError) -> bytes:
        scope["state"]["log"]["error"] = error.message
        return last_event(scope["path"], error, is_lines=reply.content_type == _STREAMS[1])


def create_gateway(settings: ServerSettings, pool: ReplicaPool) -> tuple[ASGIApp, Gateway]:
    """Return the ASGI application, with the middleware of a server, and the gateway in it."""
    gateway = Gateway(settings, pool)
    wrapped: ASGIApp = Middleware(gateway, gateway)
    if settings.cors:
        wrapped = with_cors(wrapped, settings.cors)
    return _HealthProbe(wrapped), gateway


class _HealthProbe:
    """Middleware that answers Kubernetes' health probe like Ray's proxy, without an API key."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/-/healthz":
            await PlainTextResponse("success")(scope, receive, send)
        else:
            await self.app(scope, receive, send)


async def _listens(target: Target) -> bool:
    """Return whether a replica still accepts connections."""
    host, _, port = target.address.rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


@dataclass(frozen=True, slots=True)
class _Route:
    """The route of a request, as a metrics label.

    Only a replica knows the template of a path; requests without an answer count as "other".
    """

    path: str


async def _body(receive: Receive) -> bytes:
    """Return the request body; the middleware limits its size and duration."""
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the client has disconnected")
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


def _is_stream(reply: aiohttp.ClientResponse) -> bool:
    return reply.content_type in _STREAMS


def _start(reply: aiohttp.ClientResponse, target: Target) -> dict[str, Any]:
    dropped = {name.encode() for name in _HOP_HEADERS - {"content-length"}}
    if _is_stream(reply):
        dropped.add(b"content-length")
    headers = [(name.lower(), value) for name, value in reply.raw_headers]
    headers = [(name, value) for name, value in headers if name not in dropped]
    headers.append((b"x-unspool-replica", target.name.encode()))
    return {"type": "http.response.start", "status": reply.status, "headers": headers}
