"""The application: every route, wrapped in the middleware. Only this module knows all routers."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from unspool import __version__
from unspool.errors import UnspoolError
from unspool.features import FEATURES, Feature, RouteGroup, load
from unspool.page.files import router as page_router
from unspool.server.dialects.openai_chat import router as chat_router
from unspool.server.dialects.openai_completions import router as completions_router
from unspool.server.dialects.openai_models import router as models_router
from unspool.server.http.errors import ApiError, to_api_error
from unspool.server.http.middleware import Middleware
from unspool.server.http.replies import JsonReply, error_reply, new_router
from unspool.server.http.settings import ServerSettings
from unspool.server.runtime.registry import ModelEntry, ModelRegistry, shipped_entry
from unspool.server.runtime.state import ServerState, state_of

operation_router = new_router("Operation")
_DOCS_PAGE = Path(__file__).with_name("http") / "static" / "docs.html"


@operation_router.get("/health", summary="Whether the process is alive")
@operation_router.get("/v1/health", include_in_schema=False)
async def health() -> Response:
    return JsonReply({"status": "ok"})


@operation_router.get("/ready", summary="Whether the server accepts requests")
async def ready(request: Request) -> Response:
    state = state_of(request)
    if state.admission.is_stopping or not state.ready:
        raise ApiError(503, "the server is not ready", code="not_ready", retry_after=1)
    for served in state.registry.loaded.values():
        if not served.is_alive:  # its places would never be released
            message = f"the engine of {served.name} has stopped; restart the server"
            raise ApiError(503, message, code="engine_stopped")
    return JsonReply({"status": "ready", "models": list(state.registry.loaded)})


@operation_router.get("/metrics", summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    state = state_of(request)
    return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@operation_router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    text, policy = _docs_page()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


@cache
def _docs_page() -> tuple[str, str]:
    """The page that lists the endpoints (one file, works offline), and its policy header."""
    text = _DOCS_PAGE.read_text(encoding="utf-8")
    directives = {
        "default-src": "'none'",
        "style-src": _hashes("style", text),
        "script-src": _hashes("script", text),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return text, "; ".join(f"{name} {value}" for name, value in directives.items())


def _hashes(tag: str, text: str) -> str:
    """Hashes of the content of these elements, as a policy lists them."""
    parts = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (hashlib.sha256(part.encode()).digest() for part in parts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


_DESCRIPTION = """The APIs of OpenAI, Anthropic, Ollama, llama.cpp and KoboldAI for local models,
and a tree of tokens: every text can be inspected, edited, forked and rewound."""

# Imported when the server starts: what nearly every client uses.
_ROUTERS = (models_router, chat_router, completions_router, operation_router, page_router)

# Imported with the first request, in the order of /docs.
ROUTE_GROUPS = (
    RouteGroup(
        ("/v1/responses", "/responses"), ("unspool.server.dialects.openai_responses:router",)
    ),
    RouteGroup(("/v1/messages",), ("unspool.server.dialects.anthropic:router",)),
    RouteGroup(("/v1/embeddings",), ("unspool.server.dialects.openai_embeddings:router",)),
    RouteGroup(
        ("/v1/rerank", "/v2/rerank", "/rerank"), ("unspool.server.dialects.rerank:router",)
    ),
    RouteGroup(("/v1/tree",), ("unspool.server.tree.routes:router",)),
    RouteGroup(("/v1/catalogue",), ("unspool.server.dialects.catalogue:router",)),
    RouteGroup(("/v1/diffuse",), ("unspool.server.dialects.diffuse:router",)),
    RouteGroup(("/v1/think",), ("unspool.server.dialects.think:router",)),
    RouteGroup(
        ("/tokenize", "/detokenize", "/vocabularies", "/apply-template", "/score"),
        ("unspool.server.dialects.tokens:router",),
    ),
    RouteGroup(("/api/",), ("unspool.server.dialects.ollama:router",)),
    RouteGroup(
        ("/api/v1/", "/api/latest/", "/api/extra/"), ("unspool.server.dialects.kobold:router",)
    ),
    RouteGroup(
        ("/completion", "/infill", "/embedding", "/lora-adapters", "/props", "/slots"),
        ("unspool.server.dialects.llamacpp:router",),
    ),
)  # fmt: skip

# Exceptions that become an error response; the last one stands for all others.
_HANDLED = (
    ApiError,
    UnspoolError,
    RequestValidationError,
    HTTPException,
    TimeoutError,
    ConnectionResetError,
    Exception,
)


class _Api(FastAPI):
    """FastAPI that imports route groups with the first request for one of their paths.

    Importing all of them takes 0.4 s, and those of features 0.2 s more, beside 1.6 s for the rest
    of the application (processor seconds on a shared x86 core, November 2026;
    docs/research/log.md).

    Imports and the OpenAPI document run on a thread of their own: they block neither the event
    loop nor requests for other paths, and do not wait for a free thread of the request pools.
    """

    def __init__(self, groups: Sequence[RouteGroup], **options: Any) -> None:
        super().__init__(**options)
        self._groups = list(groups)
        self._missing = list(groups)  # not imported yet
        self._including = threading.Lock()  # never taken on the event loop
        self._importer = ThreadPoolExecutor(1, thread_name_prefix="unspool-import")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            loop, path = asyncio.get_running_loop(), scope["path"]
            if path == self.openapi_url and self.openapi_schema is None:
                await loop.run_in_executor(self._importer, self.openapi)
            elif groups := [group for group in self._missing if path.startswith(group.paths)]:
                await loop.run_in_executor(self._importer, self._include, groups)
        await super().__call__(scope, receive, send)

    def prepare(self, path: str, target: str, state: ServerState) -> None:
        """Import the routes of a path and call a function with the state, on the import thread:
        while the first model loads, and before the first request."""
        groups = [group for group in self._groups if path in group.paths]
        self._importer.submit(self._include, groups)
        self._importer.submit(lambda: load(target)(state))

    def _include(self, groups: Iterable[RouteGroup]) -> None:
        """Import the routes of these groups, each once. Thread-safe."""
        with self._including:
            for group in [group for group in groups if group in self._missing]:
                for target in group.routers:
                    self.include_router(load(target))
                self._missing.remove(group)  # last: until then requests for it wait

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document. FastAPI documents 422 where this server, as OpenAI, sends 400."""
        self._include(self._groups)
        document = super().openapi()
        for path in document["paths"].values():
            for operation_json in path.values():
                operation_json["responses"].pop("422", None)
        return document


def create_app(
    settings: ServerSettings, registry: ModelRegistry, features: Sequence[Feature] = FEATURES
) -> tuple[ASGIApp, ServerState]:
    """Build the application, which loads its first model on startup; and its state."""
    state = ServerState(settings, registry)
    registry.find = _model_finder(state, features)
    api = _Api(
        [*ROUTE_GROUPS, *(group for feature in features for group in feature.routes)],
        title="Unspool",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=_lifespan(state),
        docs_url=None,  # FastAPI's own pages load scripts from a CDN
        redoc_url=None,
    )
    api.state.server = state
    for router in _ROUTERS:
        api.include_router(router)
    for kind in _HANDLED:
        api.add_exception_handler(kind, _error_reply)
    app: ASGIApp = Middleware(api, state)
    if settings.cors:
        app = with_cors(app, settings.cors)
    return app, state


def _model_finder(
    state: ServerState, features: Sequence[Feature]
) -> Callable[[str], ModelEntry | None]:
    """A function that finds models in no list: shipped ones, and those of features."""
    finders = [finder for feature in features for finder in feature.models]

    def find(name: str) -> ModelEntry | None:
        entry = shipped_entry(name)
        for finder in finders:
            if entry is None and re.fullmatch(finder.pattern, name):
                entry = load(finder.find)(state, name)
        return entry

    return find


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Allow pages of these origins to send requests and to read these response headers."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "PATCH", "DELETE"],
        allow_headers=["*"],
        expose_headers=[
            "x-request-id",
            "retry-after",
            "x-unspool-ignored",
            "x-unspool-note",
            "x-unspool-replica",
        ],
    )


def _error_reply(request: Request, error: Exception) -> Response:
    api_error = to_api_error(error)
    is_gone = isinstance(error, ConnectionResetError)
    request.state.log.setdefault("gone" if is_gone else "error", is_gone or api_error.message)
    return error_reply(api_error, request.url.path)


def _lifespan(state: ServerState) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        closing = asyncio.ensure_future(state.registry.close_idle())
        if state.database is not None and isinstance(api, _Api):
            api.prepare("/v1/tree", "unspool.server.tree.branch_json:branch_store", state)
        try:
            async with state.registry.use(None):
                state.ready = True
        except Exception as error:  # reported by the caller of the server
            state.startup_error = error
        try:
            yield
        finally:
            state.ready = False
            closing.cancel()
            await asyncio.to_thread(state.finish_saving)
            await state.registry.close_all()
            await asyncio.to_thread(state.close)

    return lifespan
