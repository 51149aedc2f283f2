"""The application: all routes, behind the middleware."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from unspool import __version__
from unspool.errors import UnspoolError
from unspool.page import files as page_files
from unspool.serve import tokens
from unspool.serve.anthropic import messages
from unspool.serve.core.registry import ModelRegistry
from unspool.serve.core.state import ServerState
from unspool.serve.http import docs_page, operation
from unspool.serve.http.errors import ApiError, to_api_error
from unspool.serve.http.middleware import Middleware
from unspool.serve.http.routes import error_reply
from unspool.serve.http.settings import ServeSettings
from unspool.serve.llamacpp import completion
from unspool.serve.ollama import embed as ollama_embed
from unspool.serve.ollama import models as ollama_models
from unspool.serve.ollama import writing as ollama_writing
from unspool.serve.openai import chat, completions, embeddings, models, responses
from unspool.serve.tree import endpoints as tree

_ABOUT = """OpenAI's API and Anthropic's messages for local models, and a tree of tokens:
every text can be taken back, changed and gone on with."""


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


def create_app(settings: ServeSettings, registry: ModelRegistry) -> tuple[ASGIApp, ServerState]:
    """The application, which loads its first model as it starts; and its state."""
    state = ServerState(settings, registry)
    api = FastAPI(
        title="Unspool",
        version=__version__,
        description=_ABOUT,
        lifespan=_lifespan(state),
        docs_url=None,  # FastAPI's own pages load their scripts from elsewhere
        redoc_url=None,
    )
    api.state.server = state
    parts = [models, chat, completions, responses, messages, embeddings]  # in this order at /docs
    ollama = [ollama_writing, ollama_embed, ollama_models]
    for part in (*parts, *ollama, completion, tokens, tree, operation, docs_page, page_files):
        api.include_router(part.router)
    api.openapi = partial(_document, api.openapi)  # type: ignore[method-assign]
    for kind in _KNOWN:
        api.add_exception_handler(kind, _error_reply)
    wrapped: ASGIApp = Middleware(api, state)
    if settings.cors:
        wrapped = CORSMiddleware(
            wrapped,
            allow_origins=settings.cors,
            allow_methods=["GET", "POST", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "x-unspool-ignored", "x-unspool-note"],
        )
    return wrapped, state


def _document(generate: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The OpenAPI document. FastAPI promises 422 where this server, as OpenAI, answers 400."""
    document = generate()
    for path in document["paths"].values():
        for operation_json in path.values():
            operation_json["responses"].pop("422", None)
    return document


def _error_reply(request: Request, error: Exception) -> Response:
    known = to_api_error(error)
    is_gone = isinstance(error, ConnectionResetError)
    request.state.log.setdefault("gone" if is_gone else "error", is_gone or known.message)
    return error_reply(known, request.url.path)


def _lifespan(state: ServerState) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        closing = asyncio.ensure_future(state.registry.close_idle())
        async with state.registry.use(None):
            state.ready = True
        try:
            yield
        finally:
            state.ready = False
            closing.cancel()
            await state.registry.close_all()

    return lifespan
