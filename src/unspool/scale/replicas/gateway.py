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
import collections
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal, Protocol
from urllib.parse import parse_qsl

import aiohttp
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from unspool.scale.replicas.routing import RouteHints, read_hints
from unspool.server.app import with_cors
from unspool.server.http.admission import Admission
from unspool.server.http.errors import (
    LLAMACPP_PATHS,
    STOPPING_HEADER,
    ApiError,
    shutting_down,
    thread_not_found,
)
from unspool.server.http.events import WIRE_EXTENSION, AsgiWire, Wire, event
from unspool.server.http.middleware import ROUTE_HEADER, CancelOnDisconnect, Middleware
from unspool.server.http.replies import JsonReply, to_json
from unspool.server.http.settings import ServerSettings

# -- Errors for clients when a replica is lost

_NAMED_EVENTS = ("/v1/tree", "/v1/think", "/v1/diffuse", "/v1/costs", "/v1/runs")


class ReplicaLostError(Exception):
    """The only replica that could answer does not exist (any more)."""


def replica_gone(path: str) -> ApiError:
    """Return the error for an object that only a lost replica had."""
    what = "response" if path.startswith("/v1/responses") else "branch"
    if path.startswith("/v1/messages"):
        return thread_not_found()
    return ApiError(
        410,
        f"the replica that stored this {what} is gone, and the {what} with it; start a new one",
        code="replica_gone",
    )


def replica_lost() -> ApiError:
    """Return the error for a request whose replica was lost; a retry can succeed."""
    return ApiError(
        503,
        "the replica that processed this request was lost; send the request again",
        code="replica_lost",
        retry_after=1,
    )


def no_replica() -> ApiError:
    return ApiError(503, "no replica is ready", code="not_ready", retry_after=5)


def last_event(path: str, error: ApiError, *, is_lines: bool) -> bytes:
    """Return the last event of a stream whose replica was lost, in the format of the client."""
    if is_lines:
        return to_json(error.ollama()) + b"\n"
    if path.startswith("/v1/messages"):
        return event(error.anthropic(), "error")
    if path.startswith("/v1/responses"):
        payload = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return event(payload, "error")
    if path.startswith(_NAMED_EVENTS):
        return event(error.openai(), "error")
    return event(error.llamacpp() if path in LLAMACPP_PATHS else error.openai())


# -- A gateway's view of the replicas: which exist, their load, and which one to use

_WAIT_SECONDS = 30.0  # if there is no replica: one is probably starting
_SUSPECT_SECONDS = 5.0  # to avoid a replica after a broken connection, until Ray notices


@dataclass(frozen=True, slots=True)
class Target:
    """A replica to send a request to."""

    name: str
    address: str  # host:port


class ReplicaChooser(Protocol):
    """Chooses among the known replicas: Ray, or a test."""

    async def choose(self, hints: RouteHints) -> Target:
        """Return the replica for a request and set `hints.replicas`.

        Waits while there is none. Raises ReplicaLostError if the only possible one is gone.
        """


class RayChooser:
    """Chooses with Ray Serve and the request router in `request_router.py`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def choose(self, hints: RouteHints) -> Target:
        # Without a reservation nothing is sent: the router in this process only returns the name.
        # Ray does the same where HAProxy forwards its requests.
        async with self._handle.choose_replica(hints, _reserve=False) as selection:
            name = selection.replica_id
        return Target(name, hints.replicas[name])


class ReplicaPool:
    """Chooses replicas and counts the requests in flight of each."""

    def __init__(self, chooser: ReplicaChooser, wait: float = _WAIT_SECONDS) -> None:
        self._chooser, self._wait = chooser, wait
        self.in_flight: collections.Counter[str] = collections.Counter()
        self._suspects: dict[str, float] = {}  # replicas to avoid, until a monotonic time

    async def choose(self, hints: RouteHints) -> Target:
        hints.load = dict(self.in_flight)
        now = monotonic()
        self._suspects = {name: until for name, until in self._suspects.items() if until > now}
        if hints.kind != "kept":
            hints.avoid |= self._suspects.keys()
        try:
            async with asyncio.timeout(self._wait):
                return await self._chooser.choose(hints)
        except TimeoutError:
            raise no_replica() from None

    async def all(self, wait: float = 1.0) -> dict[str, str]:
        """Return all replicas: name -> address."""
        hints = RouteHints()
        try:
            async with asyncio.timeout(wait):
                await self._chooser.choose(hints)
        except TimeoutError:
            return {}
        return hints.replicas

    @contextmanager
    def count_in_flight(self, target: Target) -> Iterator[None]:
        self.in_flight[target.name] += 1
        try:
            yield
        finally:
            self.in_flight[target.name] -= 1
            if not self.in_flight[target.name]:
                del self.in_flight[target.name]

    def avoid(self, target: Target) -> None:
        """Avoid a replica for a while after a broken connection."""
        self._suspects[target.name] = monotonic() + _SUSPECT_SECONDS


# -- Prometheus metrics of a gateway

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class GatewayMetrics:
    """Metrics of one gateway, in a separate registry."""

    def __init__(self, in_flight: Callable[[], Mapping[str, int]]) -> None:
        self.registry = CollectorRegistry()

        def metric(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            return kind(f"unspool_gateway_{name}", text, labels, registry=self.registry, **options)

        self.requests = metric(Counter, "requests", "Requests answered", "path", "status")
        self.seconds = metric(
            Histogram, "request_seconds", "Time for a request", "path", buckets=_SECONDS
        )
        self.cancelled = metric(
            Counter, "cancelled_requests", "Requests cancelled by the client", "path"
        )
        self.routed = metric(Counter, "routed", "Requests sent to a replica, by reason", "by")
        self.retries = metric(Counter, "retries", "Requests sent to a second replica")
        self.broken = metric(Counter, "broken_streams", "Streams broken by a lost replica")
        self.registry.register(_InFlight(in_flight))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _InFlight(Collector):
    def __init__(self, in_flight: Callable[[], Mapping[str, int]]) -> None:
        self._in_flight = in_flight

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "unspool_gateway_in_flight", "Requests in flight by replica", labels=("replica",)
        )
        for replica, count in self._in_flight().items():
            family.add_metric((replica,), count)
        yield family


# -- Merge responses of several replicas: metrics and branch lists

_SAMPLE = re.compile(rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (.*)$")


def merge_metrics(texts: Mapping[str, bytes]) -> bytes:
    """Merge Prometheus texts by replica, with a label for the replica.

    The lines of a metric family must be consecutive, so they are grouped by family.
    """
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for replica, text in texts.items():
        label = b'replica="%b"' % replica.encode()
        family = b""
        for line in text.splitlines():
            if line.startswith(b"#"):
                kind, name = line.split(b" ", 3)[1:3]
                family = name
                head = heads.setdefault(family, [])
                if not any(previous.split(b" ", 3)[1] == kind for previous in head):
                    head.append(line)
            elif sample := _SAMPLE.match(line):
                name, labels, value = sample.groups()
                all_labels = b",".join(part for part in (label, labels) if part)
                samples.setdefault(family, []).append(b"%b{%b} %b" % (name, all_labels, value))
    blocks = [[*lines, *samples.get(family, [])] for family, lines in heads.items()]
    return b"".join(line + b"\n" for block in blocks for line in block)


def merge_branches(lists: list[bytes], limit: int) -> dict[str, Any]:
    """Merge the branch lists of all replicas, the newest first; at most `limit` branches."""
    replies = [json.loads(text) for text in lists]
    branches = [branch for reply in replies for branch in reply["data"]]
    branches.sort(key=lambda branch: (branch["created"], branch["id"]), reverse=True)
    page = branches[:limit]
    has_more = len(page) < len(branches) or any(reply["next"] for reply in replies)
    after = f"{page[-1]['created']}:{page[-1]['id']}" if has_more else None
    return {"object": "list", "data": page, "next": after}


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
        self.admission = Admission(1, 0)  # only `is_stopping` is used, for shutdown
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
        query = scope["query_string"].decode("latin-1")
        limits = [value for name, value in parse_qsl(query) if name == "limit" and value.isdigit()]
        replies = await self._from_all(f"/v1/tree?{query}", scope)
        return JsonReply(merge_branches(list(replies.values()), int(limits[-1]) if limits else 100))

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
