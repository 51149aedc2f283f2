"""What a client is told when a replica is gone."""

from __future__ import annotations

from unspool.serve.http.errors import LLAMACPP_PATHS, ApiError, thread_not_found
from unspool.serve.http.events import event
from unspool.serve.http.routes import to_json

_NAMED_EVENTS = ("/v1/tree", "/v1/think", "/v1/diffuse", "/v1/costs", "/v1/runs")


class ReplicaLostError(Exception):
    """A replica that alone could answer is not there (any more)."""


def gone(path: str) -> ApiError:
    """Of something that only a lost replica had."""
    what = "response was stored" if path.startswith("/v1/responses") else "branch was kept"
    if path.startswith("/v1/messages"):
        return thread_not_found()
    return ApiError(
        410,
        f"the replica with which this {what} is gone, and the {what.split()[0]} with it; "
        "begin a new one",
        code="replica_gone",
    )


def lost() -> ApiError:
    """Of a request whose replica went away; the same request can succeed on another one."""
    return ApiError(
        503,
        "the replica that worked on this request was lost; send the request again",
        code="replica_lost",
        retry_after=1,
    )


def no_replica() -> ApiError:
    return ApiError(503, "no replica is ready", code="not_ready", retry_after=5)


def last_event(path: str, error: ApiError, *, is_lines: bool) -> bytes:
    """The end of a stream that a lost replica leaves: in the shape that its client expects."""
    if is_lines:
        return to_json(error.ollama()) + b"\n"
    if path.startswith("/v1/messages"):
        return event(error.anthropic(), "error")
    if path.startswith("/v1/responses"):
        told = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return event(told, "error")
    if path.startswith(_NAMED_EVENTS):
        return event(error.openai(), "error")
    return event(error.llamacpp() if path in LLAMACPP_PATHS else error.openai())
