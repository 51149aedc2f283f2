"""The application: all routes, behind the gate."""

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
from unspool.serve import (
    chat,
    completions,
    docs_page,
    embeddings,
    messages,
    models,
    operation,
    responses,
    text,
    tree,
)
from unspool.serve.faults import ApiError, as_api_error
from unspool.serve.gate import Gate
from unspool.serve.house import House
from unspool.serve.json_reply import error_reply
from unspool.serve.settings import ServeSettings
from unspool.serve.shelf import Shelf

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


def create_app(settings: ServeSettings, shelf: Shelf) -> tuple[ASGIApp, House]:
    """The application, which loads its first model as it starts; and its state."""
    house = House(settings, shelf)
    api = FastAPI(
        title="Unspool",
        version=__version__,
        description=_ABOUT,
        lifespan=_lifespan(house),
        docs_url=None,  # FastAPI's own pages load their scripts from elsewhere
        redoc_url=None,
    )
    api.state.house = house
    for part in (models, chat, completions, responses, messages, embeddings, text, tree, operation):
        api.include_router(part.router)
    api.include_router(docs_page.router)
    api.include_router(page_files.router)
    api.openapi = partial(_document, api.openapi)  # type: ignore[method-assign]
    for kind in _KNOWN:
        api.add_exception_handler(kind, _told)
    gated: ASGIApp = Gate(api, house)
    if settings.cors:
        gated = CORSMiddleware(
            gated,
            allow_origins=settings.cors,
            allow_methods=["GET", "POST", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return gated, house


def _document(usual: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The OpenAPI document. FastAPI promises 422 where this server, as OpenAI, answers 400."""
    found = usual()
    for path in found["paths"].values():
        for operation_told in path.values():
            operation_told["responses"].pop("422", None)
    return found


def _told(request: Request, error: Exception) -> Response:
    known = as_api_error(error)
    request.state.log.setdefault("error", known.message)
    return error_reply(known, request.url.path)


def _lifespan(house: House) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        closing = asyncio.ensure_future(house.shelf.close_idle())
        async with house.shelf.use(None):
            house.ready = True
        try:
            yield
        finally:
            house.ready = False
            closing.cancel()
            await house.shelf.close_all()

    return lifespan
