"""JSON in and out: requests are read strictly (no NaN, no infinity, UTF-8 and nothing else)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Scope

from unspool.serve.http.errors import ApiError, bad_request


class _StrictRequest(Request):
    async def json(self) -> Any:
        return parsed(await self.body())


class _StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Any]:
        read = super().get_route_handler()

        async def handler(request: Request) -> Any:
            return await read(_StrictRequest(_as_json(request.scope), request.receive))

        return handler


def _as_json(scope: Scope) -> Scope:
    """The same request with its body called JSON, as `curl -d` does not.

    Pages of other origins, which may send forms and plain text, do not get here: see `Middleware`.
    """
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}


def new_router(tag: str, prefix: str = "") -> APIRouter:
    return APIRouter(prefix=prefix, tags=[tag], route_class=_StrictRoute)


def parsed(body: bytes) -> Any:
    """JSON, or an error that says what is wrong with it."""
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise bad_request("the body is nested too deep") from None
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {str(error)[:200]}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number


def to_json(value: Any) -> bytes:
    """JSON as bytes; half a character, which a client may have sent, becomes a question mark."""
    return _encode(value).encode("utf-8", "replace")


# Made once: `json.dumps` would make one for every chunk of every stream.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class JsonReply(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def __init__(
        self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(to_json(content), status, dict(headers or {}))


def error_reply(error: ApiError, path: str) -> JsonReply:
    return JsonReply(error.body(path), error.status, error.headers)
