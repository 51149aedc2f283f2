"""Conversations that a template refuses as they are, put so that it may take them.

Some templates insist that user and assistant take turns, and that a system message comes first or
not at all. Clients send two messages of one side in a row, and instructions in the middle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from unspool.text.chat.messages import Message, checked_messages, joined_parts

_BETWEEN = "\n\n"  # messages that become one


def other_ways(messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    """The same conversation in other turns; each way changes more than the one before."""
    plain = [joined_parts(message) for message in checked_messages(messages)]
    joined = _joined(plain)
    if joined != plain:
        yield joined
    if any(message["role"] == "system" for message in joined[1:]):
        joined = _joined([joined[0], *map(_as_user, joined[1:])])
        yield joined
    if joined[0]["role"] == "system":
        yield _joined([_as_user(message) for message in joined])


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "user"} if message["role"] == "system" else message


def _joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of one side in a row as one; calls and their results stay apart."""
    found: list[dict[str, Any]] = []
    for message in messages:
        before = found[-1] if found else None
        if before is not None and before["role"] == message["role"] and _is_words(before, message):
            content = _BETWEEN.join(filter(None, (before["content"], message["content"])))
            found[-1] = {**before, **message, "content": content}
        else:
            found.append(message)
    return found


def _is_words(*messages: dict[str, Any]) -> bool:
    return all(
        message["role"] != "tool"
        and not message.get("tool_calls")
        and isinstance(message["content"], str)
        for message in messages
    )
