"""Answers in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from unspool.serve.http.errors import ApiError


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
