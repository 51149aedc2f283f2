"""Validate the messages of a conversation for a chat template.

A message is a mapping with a `role` and a `content`; content is text, a list of
`{"type": "text", "text": ...}` parts, or missing where there are `tool_calls`. Other keys are
passed to the template as plain JSON values, so that it gets no object with methods.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unspool.errors import UnspoolError

Message = Mapping[str, Any]

ONLY_TEXT = "only text is supported; of a multimodal model, only the language model runs"
# Names of the same field; templates use one or the other.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def validate_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return validated copies of the messages; raise UnspoolError if one is invalid."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise UnspoolError(
            f"messages must be a list of {{'role', 'content'}}, not {type(messages).__name__}"
        )
    if not messages:
        raise UnspoolError("messages is empty: give at least one")
    return [_checked(message, number) for number, message in enumerate(messages, start=1)]


def _checked(message: Message, number: int) -> dict[str, Any]:
    where = f"message {number}"
    if not isinstance(message, Mapping):
        raise UnspoolError(f"{where} must have a role and content, got {message!r:.80}")
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
            raise UnspoolError(f"{where} has a part of type {kind!r}: {ONLY_TEXT}")


def join_text_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its text parts joined, for templates that expect a string."""
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in message["content"])}


def plain_json(value: Any, where: str) -> Any:
    """Return a copy of dict, list, str, int, float, bool and None only."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=_as_dict)
        text.encode("utf-8")
        return json.loads(text)
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise UnspoolError(f"{where} has a lone surrogate (U+{code:04X}): remove it") from None
    except TypeError as error:
        raise UnspoolError(
            f"{where}: {error}, so it cannot be passed to a chat template;"
            " use strings, numbers, lists and mappings (a tool is its JSON schema)"
        ) from None
    except (RecursionError, ValueError):
        raise UnspoolError(f"{where}: nested too deeply or circular") from None


def _as_dict(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is not JSON")


_SEPARATOR = "\n\n"  # between joined messages


def equivalent_turns(messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    """Yield equivalent conversations; each changes more than the one before."""
    plain = [join_text_parts(message) for message in validate_messages(messages)]
    joined = _join_same_role(plain)
    if joined != plain:
        yield joined
    if any(message["role"] == "system" for message in joined[1:]):
        joined = _join_same_role([joined[0], *map(_as_user, joined[1:])])
        yield joined
    if joined[0]["role"] == "system":
        yield _join_same_role([_as_user(message) for message in joined])


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "user"} if message["role"] == "system" else message


def _join_same_role(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join consecutive messages of one role, except tool calls and their results."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is not None and last["role"] == message["role"] and _are_plain_text(last, message):
            content = _SEPARATOR.join(filter(None, (last["content"], message["content"])))
            joined[-1] = {**last, **message, "content": content}
        else:
            joined.append(message)
    return joined


def _are_plain_text(*messages: dict[str, Any]) -> bool:
    return all(
        message["role"] != "tool"
        and not message.get("tool_calls")
        and isinstance(message["content"], str)
        for message in messages
    )
