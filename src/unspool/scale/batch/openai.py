"""Rows in OpenAI's batch format, answered by the server's own application, without a socket.

So whatever `unspool serve` understands of a request, a batch does too, and answers alike.
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

from unspool.scale.batch.rows import Row
from unspool.scale.batch.settings import BatchSettings, row_seed
from unspool.serve.core.registry import ModelEntry, ModelRegistry
from unspool.serve.http.app import create_app
from unspool.serve.http.errors import ApiError, bad_request, to_api_error
from unspool.serve.http.settings import ServeSettings
from unspool.session import Session

_WRITING = ("/v1/chat/completions", "/v1/completions")  # which know all sampling settings
_SEEDED = (*_WRITING, "/v1/responses")
URLS = (*_SEEDED, "/v1/embeddings")
_LONG = 1e9  # seconds: nobody waits for a single answer here


@dataclass(frozen=True, slots=True)
class Reply:
    """What the application answered."""

    status: int
    id: str
    body: dict[str, Any]


class Api:
    """The application of a model, and the event loop that it runs on."""

    def __init__(self, lm: Session, name: str, at_once: int) -> None:
        self.name = name
        settings = ServeSettings(
            max_running=at_once, max_queued=1 << 30, max_choices=at_once, max_body=1 << 30,
            deadline=_LONG, body_seconds=_LONG,
        )  # fmt: skip
        registry = ModelRegistry([ModelEntry(name, lambda: lm, 0)], room=1 << 62)
        self._app, _ = create_app(settings, registry)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="unspool-batch").start()

    def start(self, row: Row, settings: BatchSettings) -> Future[Reply]:
        """Have a row answered; an ApiError says what is wrong with it."""
        url, body = request_of(row, settings)
        return asyncio.run_coroutine_threadsafe(self._ask(url, body), self._loop)

    async def _ask(self, url: str, body: Mapping[str, Any]) -> Reply:
        content = [json.dumps(body).encode()]
        sent: list[Message] = []

        async def receive() -> Message:
            if content:
                return {"type": "http.request", "body": content.pop()}
            await asyncio.Event().wait()  # a client that never hangs up
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": url, "raw_path": url.encode(), "query_string": b"",
            "root_path": "", "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        await self._app(scope, receive, send)
        headers = dict(sent[0]["headers"])
        answer = json.loads(b"".join(part.get("body", b"") for part in sent[1:]))
        return Reply(sent[0]["status"], headers[b"x-request-id"].decode(), answer)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


def request_of(row: Row, settings: BatchSettings) -> tuple[str, dict[str, Any]]:
    """The address and the body of a row's request, with what the command says for all rows."""
    url, body = row.given.get("url"), row.given.get("body")
    if row.given.get("method", "POST") != "POST":
        raise bad_request(f"method is {str(row.given['method'])[:40]!r}; it may be POST", "method")
    if url not in URLS:
        raise bad_request(f"url is {str(url)[:80]!r}; it may be {', '.join(URLS)}", "url")
    if not isinstance(body, dict):
        raise bad_request("body is missing; it holds what is asked for", "body")
    if body.get("stream"):
        raise bad_request("nothing can be streamed into a file; leave stream out", "stream")
    asked = {name: value for name, value in body.items() if name != "stream"}
    if settings.any_model:
        asked.pop("model", None)
    if url in _WRITING:
        asked = {**_usual(settings.options, asked), **asked}
    if url in _SEEDED and asked.get("seed") is None:
        asked["seed"] = row_seed(settings.seed, row.key)
    return url, asked


def _usual(options: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The command's settings as a request has them."""
    usual = dict(options)
    if "max_completion_tokens" in asked:
        usual.pop("max_tokens", None)
    if "logit_bias" in usual:
        usual["logit_bias"] = {str(token): each for token, each in usual["logit_bias"].items()}
    return usual


# -- the lines of the output -------------------------------------------------------------------


def answer_line(row: Row, reply: Reply) -> dict[str, Any]:
    """A line of OpenAI's output file, or of its file of errors."""
    response = {"status_code": reply.status, "request_id": reply.id, "body": reply.body}
    error = None
    if reply.status != 200:
        told = reply.body["error"]
        error = {"code": told.get("code") or told.get("type"), "message": told["message"]}
        if error["code"] == "model_not_found":
            error["message"] += "; --any-model has that one answer all rows"
    return {"id": _line_id(row), "custom_id": row.id, "response": response, "error": error}


def fault_line(row: Row, error: Exception | str) -> dict[str, Any]:
    """A line for a row that never became a request."""
    if isinstance(error, str):
        told = {"code": "invalid_row", "message": error}
        custom = row.given.get("custom_id") if isinstance(row.given, dict) else None
        return {"id": _line_id(row), "custom_id": custom, "response": None, "error": told}
    known = error if isinstance(error, ApiError) else to_api_error(error)
    return answer_line(row, Reply(known.status, _line_id(row), known.openai()))


def _line_id(row: Row) -> str:
    return f"batch_req_{hashlib.sha256(f'{row.number} {row.key}'.encode()).hexdigest()[:24]}"
