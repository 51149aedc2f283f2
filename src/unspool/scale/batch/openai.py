"""Rows in OpenAI's batch format, answered by the server's ASGI application without a socket.

So a batch supports the same requests as `unspool serve`, with the same answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from starlette.types import Message

from unspool.scale.batch.rows import BatchRow, BatchSettings, row_seed
from unspool.server.app import create_app
from unspool.server.http.errors import ApiError, bad_request, to_api_error
from unspool.server.http.settings import ServerSettings
from unspool.server.runtime.registry import ModelEntry, ModelRegistry
from unspool.session import Session

_WITH_SAMPLING = ("/v1/chat/completions", "/v1/completions")  # accept all sampling settings
_SEEDED = (*_WITH_SAMPLING, "/v1/responses")
URLS = (*_SEEDED, "/v1/embeddings")
_NO_TIMEOUT = 1e9  # seconds


@dataclass(frozen=True, slots=True)
class Reply:
    """The application's response."""

    status: int
    id: str
    body: dict[str, Any]


class InProcessApi:
    """The application of a model, and its event loop."""

    def __init__(self, lm: Session, name: str, at_once: int) -> None:
        self.name = name
        settings = ServerSettings(
            max_running=at_once, max_queued=1 << 30, max_choices=at_once, max_body=1 << 30,
            deadline=_NO_TIMEOUT, body_seconds=_NO_TIMEOUT,
        )  # fmt: skip
        registry = ModelRegistry([ModelEntry(name, lambda: lm, 0)], model_memory=1 << 62)
        self._app, _ = create_app(settings, registry)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="unspool-batch").start()

    def start(self, row: BatchRow, settings: BatchSettings) -> Future[Reply]:
        """Start the request of a row; raise ApiError if the row is invalid."""
        url, body = build_request(row, settings)
        return asyncio.run_coroutine_threadsafe(self._ask(url, body), self._loop)

    async def _ask(self, url: str, body: Mapping[str, Any]) -> Reply:
        content = [json.dumps(body).encode()]
        response: list[Message] = []

        async def receive() -> Message:
            if content:
                return {"type": "http.request", "body": content.pop()}
            await asyncio.Event().wait()  # a client that never disconnects
            raise AssertionError

        async def send(message: Message) -> None:
            response.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": url, "raw_path": url.encode(), "query_string": b"",
            "root_path": "", "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        await self._app(scope, receive, send)
        headers = dict(response[0]["headers"])
        answer = json.loads(b"".join(part.get("body", b"") for part in response[1:]))
        return Reply(response[0]["status"], headers[b"x-request-id"].decode(), answer)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


def build_request(row: BatchRow, settings: BatchSettings) -> tuple[str, dict[str, Any]]:
    """Return URL and body of a row's request, with the settings of the command."""
    url, body = row.data.get("url"), row.data.get("body")
    if row.data.get("method", "POST") != "POST":
        method = str(row.data["method"])[:40]
        raise bad_request(f"method must be POST, got {method!r}", "method")
    if url not in URLS:
        raise bad_request(f"url must be one of {', '.join(URLS)}, got {str(url)[:80]!r}", "url")
    if not isinstance(body, dict):
        raise bad_request("body is missing: give the request", "body")
    if body.get("stream"):
        raise bad_request("a batch does not stream: leave out stream", "stream")
    request = {name: value for name, value in body.items() if name != "stream"}
    if settings.any_model:
        request.pop("model", None)
    if url in _WITH_SAMPLING:
        request = {**_defaults(settings.options, request), **request}
    if url in _SEEDED and request.get("seed") is None:
        request["seed"] = row_seed(settings.seed, row.key)
    return url, request


def _defaults(options: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the command's settings as fields of a request."""
    defaults = dict(options)
    if "max_completion_tokens" in request:
        defaults.pop("max_tokens", None)
    if "logit_bias" in defaults:
        biases = defaults["logit_bias"].items()
        defaults["logit_bias"] = {str(token): bias for token, bias in biases}
    return defaults


def answer_line(row: BatchRow, reply: Reply) -> dict[str, Any]:
    """Return a line of OpenAI's output file or error file."""
    response = {"status_code": reply.status, "request_id": reply.id, "body": reply.body}
    error = None
    if reply.status != 200:
        detail = reply.body["error"]
        error = {"code": detail.get("code") or detail.get("type"), "message": detail["message"]}
        if error["code"] == "model_not_found":
            error["message"] += "; --any-model lets this model answer all rows"
    return {"id": _line_id(row), "custom_id": row.id, "response": response, "error": error}


def fault_line(row: BatchRow, error: Exception | str) -> dict[str, Any]:
    """Return an error line for a row without a valid request."""
    if isinstance(error, str):
        detail = {"code": "invalid_row", "message": error}
        custom = row.data.get("custom_id") if isinstance(row.data, dict) else None
        return {"id": _line_id(row), "custom_id": custom, "response": None, "error": detail}
    api_error = error if isinstance(error, ApiError) else to_api_error(error)
    return answer_line(row, Reply(api_error.status, _line_id(row), api_error.openai()))


def _line_id(row: BatchRow) -> str:
    return f"batch_req_{hashlib.sha256(f'{row.number} {row.key}'.encode()).hexdigest()[:24]}"
