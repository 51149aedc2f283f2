"""The application: all routes, behind the middleware."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from unspool import __version__
from unspool.errors import UnspoolError
from unspool.page import files as page_files
from unspool.serve.core.registry import ModelRegistry
from unspool.serve.core.state import ServerState
from unspool.serve.http import docs_page, operation
from unspool.serve.http.errors import ApiError, to_api_error
from unspool.serve.http.later import LATER, Later
from unspool.serve.http.middleware import Middleware
from unspool.serve.http.routes import error_reply
from unspool.serve.http.settings import ServeSettings
from unspool.serve.http.threads import load_in_thread
from unspool.serve.openai import chat, completions, models

_ABOUT = """The APIs of OpenAI, Anthropic, Ollama and llama.cpp for local models, and a tree of
tokens: every text can be taken back, changed and gone on with."""


# Errors that become an answer; the last one for all that nobody foresaw.
_KNOWN = (
    ApiError,
    UnspoolError,
    RequestValidationError,
    HTTPException,
    TimeoutError,
    ConnectionResetError,
    Exception,
)


class _Api(FastAPI):
    """Routes of which most are imported when one of them is first asked for: a server that is asked
    for chats need not wait until it knows all other APIs too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._later = list(LATER)
        self._importing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            async with self._importing:
                for part in [part for part in self._later if scope["path"].startswith(part.paths)]:
                    await load_in_thread(part.routers)
                    self._include(part)
        await super().__call__(scope, receive, send)

    def _include(self, part: Later) -> None:
        self._later.remove(part)
        for router in part.routers():
            self.include_router(router)

    def openapi(self) -> dict[str, Any]:
        """The document. FastAPI promises 422 where this server, as OpenAI, answers 400."""
        for part in list(self._later):
            self._include(part)
        document = super().openapi()
        for path in document["paths"].values():
            for operation_json in path.values():
                operation_json["responses"].pop("422", None)
        return document


def create_app(settings: ServeSettings, registry: ModelRegistry) -> tuple[ASGIApp, ServerState]:
    """The application, which loads its first model as it starts; and its state."""
    state = ServerState(settings, registry)
    api = _Api(
        title="Unspool",
        version=__version__,
        description=_ABOUT,
        lifespan=_lifespan(state),
        docs_url=None,  # FastAPI's own pages load their scripts from elsewhere
        redoc_url=None,
    )
    api.state.server = state
    for part in (models, chat, completions, operation, docs_page, page_files):
        api.include_router(part.router)
    for kind in _KNOWN:
        api.add_exception_handler(kind, _error_reply)
    wrapped: ASGIApp = Middleware(api, state)
    if settings.cors:
        wrapped = with_cors(wrapped, settings.cors)
    return wrapped, state


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application for pages of these origins: what they may send, and see of the answer."""
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
    known = to_api_error(error)
    is_gone = isinstance(error, ConnectionResetError)
    request.state.log.setdefault("gone" if is_gone else "error", is_gone or known.message)
    return error_reply(known, request.url.path)


def _lifespan(state: ServerState) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        closing = asyncio.ensure_future(state.registry.close_idle())
        try:
            async with state.registry.use(None):
                state.ready = True
        except Exception as error:  # told by whoever started the server, in a line
            state.fault = error
        try:
            yield
        finally:
            state.ready = False
            closing.cancel()
            await state.registry.close_all()

    return lifespan
