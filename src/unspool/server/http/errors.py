"""Error responses: a status, and a body in the shape that each API's clients expect.

OpenAI's clients expect `{"error": {"message", "type", "param", "code"}}`, Anthropic's
`{"type": "error", "error": {"type", "message"}}`, Ollama's `{"error": message}`. Every exception
that a request raises is converted here.
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
    """An error response. A subclass because FastAPI only lets HTTPException through its parsing."""

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
        self.details = details  # Anthropic's clients read them to recover

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
        """The body that clients of this path expect."""
        if path.startswith("/v1/messages"):
            return self.anthropic()
        if path.startswith("/api/"):
            return self.ollama()
        return self.llamacpp() if path in LLAMACPP_PATHS else self.openai()


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """An invalid request (400)."""
    return ApiError(400, message, param=param, code=code)


def too_long(message: str, num_tokens: int | None, context: int | None) -> ApiError:
    """A prompt that does not fit: its number of tokens (or a lower bound), and how many fit."""
    return ApiError(400, message, code=TOO_LONG, num_prompt_tokens=num_tokens, context=context)


def unsupported(param: str, why: str) -> ApiError:
    """A parameter of the API that this server lacks: rejected by name, never ignored."""
    return ApiError(400, f"{param} is not supported: {why}", param=param, code="unsupported_value")


def thread_not_found() -> ApiError:
    """A thread of `/v1/messages` that is not stored: clients then send the whole conversation."""
    message = "previous_message_id is in no stored thread; send all messages as a new thread"
    details = {"error_code": "thread_not_found"}
    return ApiError(404, message, param="thread", code="thread_not_found", details=details)


STOPPING_HEADER = "x-unspool-stopping"  # header: the gateway should try another replica


def shutting_down() -> ApiError:
    error = ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)
    error.headers = {**(error.headers or {}), STOPPING_HEADER: "true"}
    return error


def to_api_error(error: BaseException) -> ApiError:
    """Convert any exception. The message of an internal error reveals no details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextError):
        return too_long(str(error), error.num_tokens, error.context)
    if isinstance(error, BusyError):
        return ApiError(503, str(error), code="overloaded", retry_after=1)
    if isinstance(error, UnspoolError):
        return bad_request(str(error), param=_setting_name(str(error)))
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request timed out before its text was finished")
    if isinstance(error, ConnectionResetError):
        return ApiError(499, str(error))  # only for the log
    if isinstance(error, RequestValidationError | ValidationError):
        return invalid(error.errors())
    if isinstance(error, AnyHTTPException):
        return ApiError(error.status_code, str(error.detail), code=_slug(str(error.detail)))
    if isinstance(error, RecursionError):
        return bad_request("the request is nested too deep")
    if isinstance(error, MemoryError):
        return ApiError(503, "not enough memory for this request", retry_after=5)
    return ApiError(500, "internal server error; see the server's log")


def invalid(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The message for pydantic's errors: the first of the deepest ones. Where a value may have
    several forms, the one that matches furthest is most likely the intended one."""
    unreadable = {"loc": (), "msg": "the request cannot be parsed", "type": ""}
    first: Mapping[str, Any] = max(errors, key=_depth, default=unreadable)
    place, kind = _place(first), str(first["type"])
    name = ".".join(place) or None
    if kind == "wrong_type" or (kind == "literal_error" and place[-1:] == ["type"]):
        value = first["input"].get("type") if isinstance(first["input"], dict) else first["input"]
        words = [part for part in place if not part.isdigit() and part != "type"]
        what = f"{words[-1] if words else 'a value'} of type {str(value)[:60]!r}"
        expected = first["msg"] if kind == "wrong_type" else first["ctx"]["expected"]
        return unsupported(what, f"allowed: {expected}")
    if kind == "extra_forbidden":
        return bad_request(_unknown_parameter(name or ""), name, "unknown_parameter")
    if kind == "missing":
        what = f"{name} is missing" if name else "the request has no body"
        return bad_request(f"{what}; it is required", name, "missing_required_parameter")
    if kind == "json_invalid":
        return bad_request(f"the body is not JSON: {first.get('ctx', {}).get('error', '')}")
    if kind in ("model_attributes_type", "dict_type") and name is None:
        return bad_request("the body must be a JSON object, sent as application/json")
    rule = _rule(first)
    if rule is None:
        message = re.sub(r"^(Value|Assertion) error, ", "", str(first["msg"]))
        return bad_request(f"{name}: {message}" if name else message, name, "invalid_value")
    if kind.endswith(_TYPE_ERRORS):  # a value that may be of several types: name all of them
        others = [error for error in errors if _place(error) == place]
        kinds = [error for error in others if error["type"].endswith(_TYPE_ERRORS)]
        names = dict.fromkeys(rule for error in kinds if (rule := _rule(error)))
        *most, last = [text.removeprefix("be ") for text in names]
        rule = f"be {', '.join(most)} or {last}" if most else f"be {last}"
    message = f"{name or 'the value'} must {rule}, got {_json_text(first['input'], kind)}"
    return bad_request(message, name, "invalid_value")


def _depth(error: Mapping[str, Any]) -> tuple[int, bool]:
    """How far the value matches a form: a list that is too short is a list, if one is allowed."""
    return len(error["loc"]), error["type"] in ("too_short", "too_long")


def _place(error: Mapping[str, Any]) -> list[str]:
    """The path of the field in the request; pydantic's begins with the part of the request."""
    parts = [str(part) for part in error["loc"]]
    parts = parts[1:] if parts[:1] in (["body"], ["query"], ["path"], ["header"]) else parts
    return [part for part in parts if not _is_type_name(part)]


_TYPE_ERRORS = ("_type", "_parsing", "literal_error")
_RULES = {  # pydantic's types of errors: what the field must do
    "greater_than_equal": "be >= {ge}",
    "greater_than": "be > {gt}",
    "less_than_equal": "be <= {le}",
    "less_than": "be < {lt}",
    "string_too_short": "have at least {min_length} characters",
    "string_too_long": "have at most {max_length} characters",
    "too_short": "have at least {min_length} items",
    "too_long": "have at most {max_length} items",
    "string_pattern_mismatch": "match {pattern}",
    "literal_error": "be {expected}",
    "finite_number": "be a finite number",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"),
                    "be an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "be true or false"),
    "string_type": "be a string",
    "list_type": "be a list",
    "tuple_type": "be a list",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "be an object"),
}  # fmt: skip


def _rule(error: Mapping[str, Any]) -> str | None:
    """What the value must do, such as `be >= 1`; None for other errors, whose message says it."""
    template = _RULES.get(str(error["type"]))
    rule = template and template.format_map(error.get("ctx", {}))
    return rule and re.sub(r"(least|most) 1 (\w+)s$", r"\1 1 \2", rule)


def _json_text(value: Any, kind: str = "") -> str:
    """A value of a request in an error message: short, in the words of JSON."""
    if kind.endswith(("_short", "_long")) and hasattr(value, "__len__"):
        return str(len(value))
    if value is None or isinstance(value, bool):
        return str(value).replace("None", "null").lower()
    if isinstance(value, list | tuple):
        return "a list"
    return "an object" if isinstance(value, dict) else f"{value!r:.60}"


known_names: set[str] = set()
"""Names of all request parameters, filled by the request classes; for suggestions."""


def _unknown_parameter(name: str) -> str:
    last = name.rpartition(".")[2]
    close = difflib.get_close_matches(last, sorted(known_names - {last}), n=1, cutoff=0.75)
    suggestion = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown or unsupported parameter {name[:100]!r}{suggestion}"


def _is_type_name(part: str) -> bool:
    """Whether this part of pydantic's `loc` names a member of a union, not a field."""
    return bool(re.search(r"[\[\](){}'-]", part)) or part in _TYPE_NAMES or part[:1].isupper()


_TYPE_NAMES = {"str", "int", "float", "bool", "list", "dict", "function-wrap", "function-after"}


def _setting_name(message: str) -> str | None:
    """The setting that an error of settings names first."""
    match = re.match(r"([a-z][a-z_]*) (was|is|named|held|must|may) ", message)
    return match[1] if match and ("_" in match[1] or match[1] in _ONE_WORD_SETTINGS) else None


_ONE_WORD_SETTINGS = {"temperature", "seed", "stages", "eta", "speculate", "guard", "stop"}


def _slug(text: str) -> str:
    return re.sub(r"[^a-z]+", "_", text.lower()).strip("_")[:40]
