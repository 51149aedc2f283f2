"""Routers whose requests are read strictly: no NaN, no infinity, UTF-8 and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute

from unspool.serve.http.errors import bad_request


class _StrictRequest(Request):
    async def json(self) -> Any:
        return parsed(await self.body())


class _StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Any]:
        usual = super().get_route_handler()

        async def handler(request: Request) -> Any:
            return await usual(_StrictRequest(request.scope, request.receive))

        return handler


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
