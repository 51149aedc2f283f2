"""What a client is told when something is wrong: a status, and words in the shape it expects.

OpenAI's clients expect `{"error": {"message", "type", "param", "code"}}`, Anthropic's
`{"type": "error", "error": {"type", "message"}}`, Ollama's `{"error": message}`. Whatever is raised
anywhere below ends here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import HTTPException, RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException as AnyHTTPException

from unspool.errors import BusyError, ContextError, UnspoolError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


LLAMACPP_PATHS = (
    "/completion", "/completions", "/chat/completions", "/infill", "/embedding", "/embeddings",
    "/rerank", "/reranking", "/v1/rerank", "/v1/reranking", "/lora-adapters", "/props", "/slots",
)  # fmt: skip
_LLAMACPP_TYPES = {501: "not_supported_error", 503: "unavailable_error"}  # others as OpenAI's
TOO_LONG = "context_length_exceeded"


class ApiError(HTTPException):
    """An answer that is an error. (FastAPI lets only its own kind through while it reads.)"""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        num_prompt_tokens: int | None = None,
        context: int | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        super().__init__(status, message, headers)
        self.status, self.message, self.param, self.code = status, message, param, code
        lengths = {"n_prompt_tokens": num_prompt_tokens, "n_ctx": context}  # llama.cpp's names
        self.lengths = {name: number for name, number in lengths.items() if number is not None}
        self.details = details  # what Anthropic's clients read to recover by themselves

    @property
    def type(self) -> str:
        if self.status >= 500:
            return _TYPES.get(self.status, "server_error")
        return _TYPES.get(self.status, "invalid_request_error")

    def openai(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
                **self.lengths,
            }
        }

    def anthropic(self) -> dict[str, Any]:
        kind = "api_error" if self.type == "server_error" else self.type
        details = {} if self.details is None else {"details": self.details}
        return {"type": "error", "error": {"type": kind, "message": self.message, **details}}

    def ollama(self) -> dict[str, Any]:
        return {"error": self.message}

    def llamacpp(self) -> dict[str, Any]:
        kind = _LLAMACPP_TYPES.get(self.status, self.type)
        if self.code == TOO_LONG:
            kind = "exceed_context_size_error"
        error = {"code": self.status, "message": self.message, "type": kind, **self.lengths}
        return {"error": error}

    def body(self, path: str) -> dict[str, Any]:
        """The shape that clients of this path expect."""
        if path.startswith("/v1/messages"):
            return self.anthropic()
        if path.startswith("/api/"):
            return self.ollama()
        return self.llamacpp() if path in LLAMACPP_PATHS else self.openai()


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be carried out as it is."""
    return ApiError(400, message, param=param, code=code)


def too_long(message: str, num_tokens: int | None, context: int | None) -> ApiError:
    """A prompt that does not fit: how many tokens it has (at least), and how many fit."""
    return ApiError(400, message, code=TOO_LONG, num_prompt_tokens=num_tokens, context=context)


def unsupported(param: str, why: str) -> ApiError:
    """A parameter that OpenAI knows and that is not there; it is named, never ignored."""
    return ApiError(400, f"{param} is not supported: {why}", param=param, code="unsupported_value")


def thread_not_found() -> ApiError:
    """A thread of `/v1/messages` that is not stored (any more): clients send all of it again."""
    message = "no thread has the message previous_message_id; send all messages as a new thread"
    details = {"error_code": "thread_not_found"}
    return ApiError(404, message, param="thread", code="thread_not_found", details=details)


STOPPING = "x-unspool-stopping"  # a header that tells a gateway to ask another replica


def shutting_down() -> ApiError:
    error = ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)
    error.headers = {**(error.headers or {}), STOPPING: "true"}
    return error


def to_api_error(error: BaseException) -> ApiError:
    """Any error as an answer. What is not the caller's doing says nothing of the inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextError):
        return too_long(str(error), error.num_tokens, error.context)
    if isinstance(error, BusyError):
        return ApiError(503, str(error), code="overloaded", retry_after=1)
    if isinstance(error, UnspoolError):
        return bad_request(str(error), param=_named(str(error)))
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request's time was up before its text was finished")
    if isinstance(error, ConnectionResetError):
        return ApiError(499, str(error))  # which nobody will read
    if isinstance(error, RequestValidationError | ValidationError):
        return invalid(error.errors())
    if isinstance(error, AnyHTTPException):
        return ApiError(error.status_code, str(error.detail), code=_slug(str(error.detail)))
    if isinstance(error, RecursionError):
        return bad_request("the request is nested too deep")
    if isinstance(error, MemoryError):
        return ApiError(503, "there is not enough memory for this request now", retry_after=5)
    return ApiError(500, "the server met an error of its own; its log has the details")


def invalid(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """What validation found, in words: of several faults the first of those that lie deepest, as
    where a value may have several forms, the one that fits furthest is the one that was meant."""
    nothing = {"loc": (), "msg": "the request cannot be read", "type": ""}
    first: Mapping[str, Any] = max(errors, key=lambda error: len(error["loc"]), default=nothing)
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    place = [part for part in place if not _is_branch(part)]
    name, kind = ".".join(place) or None, str(first["type"])
    if kind == "wrong_type" or (kind == "literal_error" and place[-1:] == ["type"]):
        given = first["input"].get("type") if isinstance(first["input"], dict) else first["input"]
        words = [part for part in place if not part.isdigit() and part != "type"]
        what = f"{words[-1] if words else 'a value'} of type {str(given)[:60]!r}"
        expected = first["msg"] if kind == "wrong_type" else first["ctx"]["expected"]
        return unsupported(what, f"it may be {expected}")
    if kind == "extra_forbidden":
        return bad_request(_unknown(name or ""), name, "unknown_parameter")
    if kind == "missing":
        what = f"{name} is missing" if name else "the request has no body"
        return bad_request(f"{what}; it is required", name, "missing_required_parameter")
    if kind == "json_invalid":
        return bad_request(f"the body is not JSON: {first.get('ctx', {}).get('error', '')}")
    if kind in ("model_attributes_type", "dict_type") and name is None:
        return bad_request("the body must be a JSON object, sent as application/json")
    message = re.sub(r"^(Value|Assertion) error, ", "", str(first["msg"]))
    return bad_request(f"{name}: {message}" if name else message, name, "invalid_value")


known_names: set[str] = set()
"""Every parameter that some request here has; the requests' classes put theirs in."""


def _unknown(name: str) -> str:
    last = name.rpartition(".")[2]
    close = difflib.get_close_matches(last, sorted(known_names - {last}), n=1, cutoff=0.75)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown or unsupported parameter {name[:100]!r}{meant}"


def _is_branch(part: str) -> bool:
    """Whether pydantic names here which of several types it tried, which no client knows of."""
    return bool(re.search(r"[\[\](){}'-]", part)) or part in _TRIED or part[:1].isupper()


_TRIED = {"str", "int", "float", "bool", "list", "dict", "function-wrap", "function-after"}


def _named(message: str) -> str | None:
    """Settings' errors begin with the name of the setting."""
    found = re.match(r"([a-z][a-z_]*) (was|is|named|held) ", message)
    return found[1] if found and ("_" in found[1] or found[1] in _SINGLE) else None


_SINGLE = {"temperature", "seed", "stages", "eta", "speculate", "guard", "stop"}


def _slug(text: str) -> str:
    return re.sub(r"[^a-z]+", "_", text.lower()).strip("_")[:40]
