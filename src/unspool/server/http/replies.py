"""JSON requests and replies; notes about ignored parameters in headers."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Scope

from unspool.server.http.errors import ApiError, bad_request

# -- JSON requests and replies. Requests are parsed strictly: UTF-8, no NaN, no infinity


class _StrictRequest(Request):
    async def json(self) -> Any:
        return parse_json(await self.body())


class _StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Any:
            return await handle(_StrictRequest(_as_json(request.scope), request.receive))

        return handler


def _as_json(scope: Scope) -> Scope:
    """Set the content type to JSON, which `curl -d` does not.

    Safe because `Middleware` rejects forms and plain text from pages of other origins.
    """
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}


def new_router(tag: str, prefix: str = "") -> APIRouter:
    return APIRouter(prefix=prefix, tags=[tag], route_class=_StrictRoute)


def parse_json(body: bytes) -> Any:
    """Parse a body. Raises 400 that says what is wrong with it."""
    try:
        return json.loads(
            body.decode("utf-8"), parse_constant=_reject_constant, parse_float=_finite_float
        )
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise bad_request("the body is nested too deep") from None
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {str(error)[:200]}") from None


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is too large")
    return number


def to_json(value: Any) -> bytes:
    """JSON as UTF-8. Lone surrogates, which a client may have sent, become question marks."""
    return _encode(value).encode("utf-8", "replace")


# Made once: `json.dumps` would make an encoder for every chunk of every stream.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class JsonReply(Response):
    """A JSON response."""

    media_type = "application/json"

    def __init__(
        self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(to_json(content), status, dict(headers or {}))


def new_id(prefix: str, replica: str = "") -> str:
    """An id like OpenAI's: chatcmpl-...; names the replica that stores the object, if one does."""
    return f"{prefix}{replica}{'_' if replica else ''}{secrets.token_hex(12)}"


def error_reply(error: ApiError, path: str) -> JsonReply:
    return JsonReply(error.body(path), error.status, error.headers)


_MAX_HEADER = 1000  # characters


def ignore(request: Request, *names: str) -> None:
    """Report that these parameters have no effect."""
    _add(request.state.log, "ignored", names)


def note(request: Request, *notes: str) -> None:
    """Report how the request was interpreted."""
    _add(request.state.log, "notes", notes)


def _add(log: dict[str, Any], name: str, words: tuple[str, ...]) -> None:
    reported = log.setdefault(name, []) if words else []
    reported += [word for word in words if word not in reported]


def note_headers(log: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    """The response headers for a request with this log."""
    headers = [
        (b"x-unspool-ignored", ", ".join(log.get("ignored", ()))),
        (b"x-unspool-note", "; ".join(log.get("notes", ()))),
    ]
    return [
        (name, text.encode("ascii", "backslashreplace")[:_MAX_HEADER])
        for name, text in headers
        if text
    ]
