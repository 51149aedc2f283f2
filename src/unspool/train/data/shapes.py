"""What one row of a data file is: a text, a conversation, or a prompt with its completion.

    {"text": "..."}                                          every word counts
    {"messages": [{"role": ..., "content": ...}, ...]}       what the assistant writes counts
    {"messages": [...], "tools": [...]}                      the same, with tools described
    {"prompt": "...", "completion": "..."}                   the completion counts

`prompt` and `completion` may be lists of messages too; then only the completion's count. A message
with `"weight": 0` does not count, as in OpenAI's files. Two older shapes are read as these:

    {"instruction": "...", "input": "...", "output": "..."}  a prompt, with or without an input
    {"conversations": [{"from": "human", "value": ...}]}     messages under other names
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unspool.errors import DataError, UnspoolError
from unspool.text.chat.messages import checked_messages

Row = Mapping[str, Any]

_READ = "text, messages, or prompt and completion"

_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


@dataclass(frozen=True, slots=True)
class Document:
    """One document: either its text, or a conversation, or pieces of text that count or not."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    pieces: tuple[tuple[str, bool], ...] | None = None  # (text, does it count for the loss)
    # A part of a long text may go on with the one before, and be gone on with by the next.
    begins: bool = True
    ends: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it to learn."""
        if self.pieces is not None:
            return not any(text for text, counts in self.pieces if counts)
        return not self.messages and not self.text

    def content(self) -> bytes:
        """What makes this document the one it is: equal for two that are duplicates."""
        if self.text is not None:
            return self.text.encode("utf-8", "surrogatepass")
        parts = self.pieces or [self.messages, self.tools]
        return json.dumps(parts, sort_keys=True).encode()


def document_of(row: Any, where: str, field: str | None = None) -> Document:
    """The document in a row; `where` says which row it is. `field` names the one with the text."""
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is no object with fields: each row must be one, with {_READ}")
    if field is not None:
        if field not in row:
            raise DataError(f"{where} has no field {field!r}: it has {_fields(row)}")
        return _text_or_messages(row[field], row.get("tools"), f"{where}, {field}")
    if "messages" in row:
        return _conversation(row["messages"], row.get("tools"), where)
    if "conversations" in row:
        turns = _as_json(row["conversations"], where)
        return _conversation([_renamed(turn) for turn in turns], row.get("tools"), where)
    if "prompt" in row and "completion" in row:
        return _completion(row["prompt"], row["completion"], row.get("tools"), where)
    if "instruction" in row and "output" in row:
        asked = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
        return _completion(asked, row["output"], None, where)
    if "text" in row:
        return _text_or_messages(row["text"], None, f"{where}, text")
    only = next(iter(row.values())) if len(row) == 1 else None
    if isinstance(only, str):
        return _text_or_messages(only, None, where)
    raise DataError(
        f"{where} has none of the fields that are read ({_READ}): it has {_fields(row)}; name the"
        " one that holds the text with --field"
    )


def _fields(row: Row) -> str:
    return ", ".join(map(str, list(row)[:12])) or "none"


def _text_or_messages(value: Any, tools: Any, where: str) -> Document:
    if isinstance(value, list):
        return _conversation(value, tools, where)
    if value is None:  # a cell without a value
        return Document(text="")
    if not isinstance(value, str):
        raise DataError(
            f"{where} is {type(value).__name__} and no text: choose another with --field"
        )
    return Document(text=_whole(value, where))


def _completion(prompt: Any, completion: Any, tools: Any, where: str) -> Document:
    if isinstance(prompt, str) and isinstance(completion, str):
        return Document(pieces=((_whole(prompt, where), False), (_whole(completion, where), True)))
    if isinstance(prompt, list) and isinstance(completion, list):
        before = [{**message, "weight": 0} for message in prompt if isinstance(message, Mapping)]
        return _conversation([*before, *completion], tools, where)
    raise DataError(f"{where}: prompt and completion must both be texts, or both be messages")


def _whole(text: str, where: str) -> str:
    """The text, if all its characters are whole: JSON can spell half of one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise DataError(f"{where} has half a character (U+{code:04X}): remove it") from None
    return text


def _renamed(turn: Any) -> Any:
    """`from` and `value` as `role` and `content`."""
    if not isinstance(turn, Mapping) or "from" not in turn:
        return turn
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn.get("value"), **rest}


def _conversation(messages: Any, tools: Any, where: str) -> Document:
    try:
        checked = checked_messages([_without_nothing(each) for each in _as_json(messages, where)])
    except UnspoolError as error:
        raise DataError(f"{where}: {error}") from None
    if not any(message["role"] == "assistant" for message in checked):
        raise DataError(f"{where} has no message of the assistant, so there is nothing to learn")
    tools = _as_json(tools, where) if tools else None
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where}: tools must be a list of descriptions of functions")
    return Document(messages=checked, tools=tools)


def _as_json(value: Any, where: str) -> Any:
    """Tables often hold lists as JSON in a text."""
    if not isinstance(value, str):
        return value if isinstance(value, list) else [value]
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"{where} holds messages or tools that are no JSON: {error}") from None


def _without_nothing(message: Any) -> Any:
    """Tables fill the keys that a message does not have with nothing."""
    if not isinstance(message, Mapping):
        return message
    return {key: value for key, value in message.items() if value is not None or key == "content"}
