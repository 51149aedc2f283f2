"""Rewrite a conversation that a template refuses into equivalent turns.

Some templates require that user and assistant alternate, and that a system message comes first or
not at all. Clients send consecutive messages of one role, and instructions in the middle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from unspool.text.chat.messages import Message, join_text_parts, validate_messages

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
