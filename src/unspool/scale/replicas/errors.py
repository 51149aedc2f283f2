"""Errors for clients when a replica is lost."""

from __future__ import annotations

from unspool.serve.http.errors import LLAMACPP_PATHS, ApiError, thread_not_found
from unspool.serve.http.events import event
from unspool.serve.http.routes import to_json

_NAMED_EVENTS = ("/v1/tree", "/v1/think", "/v1/diffuse", "/v1/costs", "/v1/runs")


class ReplicaLostError(Exception):
    """The only replica that could answer does not exist (any more)."""


def replica_gone(path: str) -> ApiError:
    """Return the error for an object that only a lost replica had."""
    what = "response" if path.startswith("/v1/responses") else "branch"
    if path.startswith("/v1/messages"):
        return thread_not_found()
    return ApiError(
        410,
        f"the replica that stored this {what} is gone, and the {what} with it; start a new one",
        code="replica_gone",
    )


def replica_lost() -> ApiError:
    """Return the error for a request whose replica was lost; a retry can succeed."""
    return ApiError(
        503,
        "the replica that processed this request was lost; send the request again",
        code="replica_lost",
        retry_after=1,
    )


def no_replica() -> ApiError:
    return ApiError(503, "no replica is ready", code="not_ready", retry_after=5)


def last_event(path: str, error: ApiError, *, is_lines: bool) -> bytes:
    """Return the last event of a stream whose replica was lost, in the format of the client."""
    if is_lines:
        return to_json(error.ollama()) + b"\n"
    if path.startswith("/v1/messages"):
        return event(error.anthropic(), "error")
    if path.startswith("/v1/responses"):
        payload = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return event(payload, "error")
    if path.startswith(_NAMED_EVENTS):
        return event(error.openai(), "error")
    return event(error.llamacpp() if path in LLAMACPP_PATHS else error.openai())
