"""The messages of a conversation, checked: what a chat template may rely on.

A message is a mapping with a `role` and a `content`; content is text, a list of
`{"type": "text", "text": ...}` parts, or nothing where there are `tool_calls`. Other keys go to the
template as they are, made of plain JSON values, so that it gets no object with methods of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unspool.errors import UnspoolError

Message = Mapping[str, Any]

# One thing under several names; templates read one or the other.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_DEEPEST = 100


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Fresh copies of the messages, fit for a template; an `UnspoolError` says what is wrong."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise UnspoolError(
            f"messages must be a list of {{'role', 'content'}}, not {type(messages).__name__}"
        )
    if not messages:
        raise UnspoolError("there is no message: give at least one")
    return [_checked(message, number) for number, message in enumerate(messages, start=1)]


def _checked(message: Message, number: int) -> dict[str, Any]:
    where = f"message {number}"
    if not isinstance(message, Mapping):
        raise UnspoolError(f"{where} must have a role and content, not be {message!r:.80}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UnspoolError(f"{where} has no role: give 'system', 'user', 'assistant' or 'tool'")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise UnspoolError(f"{where} ({role}) has no content: give it a text, '' for none")
    if not isinstance(content, str | list | tuple | None):
        raise UnspoolError(
            f"{where} ({role}) has content of type {type(content).__name__}: give a text"
        )
    copy: dict[str, Any] = plain_json(message, where)
    if isinstance(content, list | tuple):
        _check_parts(copy["content"], where)
    reasoning = next((copy[key] for key in _REASONING if copy.get(key) is not None), None)
    if reasoning is not None:
        copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
    return copy


def _check_parts(parts: list[Any], where: str) -> None:
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type", "?") if isinstance(part, dict) else type(part).__name__
            raise UnspoolError(f"{where} has a part of type {kind!r}: only text parts are read")


def joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text parts as one text, for templates that know only texts."""
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in message["content"])}


def plain_json(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of nothing but dict, list, str, int, float, bool and None."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        _check_text(value, where)
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if depth >= _DEEPEST:
        raise UnspoolError(f"{where}: nested more than {_DEEPEST} deep, which no template needs")
    if isinstance(value, Mapping):
        return {
            plain_json(key, where, depth + 1): plain_json(item, where, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_json(item, where, depth + 1) for item in value]
    raise UnspoolError(
        f"{where}: a {type(value).__name__} cannot be given to a chat template;"
        " use texts, numbers, lists and mappings (a tool is its JSON schema)"
    )


def _check_text(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise UnspoolError(
            f"{where} has half a character (U+{code:04X}) at position {error.start}: remove it"
        ) from None
