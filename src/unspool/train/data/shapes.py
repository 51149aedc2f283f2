"""Formats of a data row: a text, a conversation, or a prompt with its completion.

    {"text": "..."}                                          loss on all tokens
    {"messages": [{"role": ..., "content": ...}, ...]}       loss on the assistant's messages
    {"messages": [...], "tools": [...]}                      the same, with tool definitions
    {"prompt": "...", "completion": "..."}                   loss on the completion

`prompt` and `completion` may be lists of messages too. A message with `"weight": 0` is not in the
loss, as in OpenAI's files. Two older formats are converted to these:

    {"instruction": "...", "input": "...", "output": "..."}  a prompt, with or without an input
    {"conversations": [{"from": "human", "value": ...}]}     messages under other names
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unspool.errors import DataError, UnspoolError
from unspool.text.chat.messages import validate_messages

Row = Mapping[str, Any]

_FORMATS = "text, messages, or prompt and completion"

_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


@dataclass(frozen=True, slots=True)
class Document:
    """One document: a text, a conversation, or pieces of text with or without loss."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    pieces: tuple[tuple[str, bool], ...] | None = None  # (text, is in the loss)
    is_start: bool = True  # False: continues the previous part of a long text
    is_end: bool = True  # False: the next part continues it

    @property
    def is_empty(self) -> bool:
        """Whether no text is in the loss."""
        if self.pieces is not None:
            return not any(text for text, in_loss in self.pieces if in_loss)
        return not self.messages and not self.text

    def content(self) -> bytes:
        """Canonical bytes; equal for duplicates."""
        if self.text is not None:
            return self.text.encode("utf-8", "surrogatepass")
        parts = self.pieces or [self.messages, self.tools]
        return json.dumps(parts, sort_keys=True).encode()


def parse_row(row: Any, where: str, field: str | None = None) -> Document:
    """Parse a data row.

    Args:
        row: The row as it was read.
        where: Location of the row, for error messages.
        field: Name of the field with the text; None: detect the format.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is not an object: each row must be one, with {_FORMATS}")
    if field is not None:
        if field not in row:
            raise DataError(f"{where} has no field {field!r}; it has {_fields(row)}")
        return _text_or_messages(row[field], row.get("tools"), f"{where}, {field}")
    if "messages" in row:
        return _conversation(row["messages"], row.get("tools"), where)
    if "conversations" in row:
        turns = _as_json(row["conversations"], where)
        return _conversation([_rename_keys(turn) for turn in turns], row.get("tools"), where)
    if "prompt" in row and "completion" in row:
        return _completion(row["prompt"], row["completion"], row.get("tools"), where)
    if "instruction" in row and "output" in row:
        prompt = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
        return _completion(prompt, row["output"], None, where)
    if "text" in row:
        return _text_or_messages(row["text"], None, f"{where}, text")
    only = next(iter(row.values())) if len(row) == 1 else None
    if isinstance(only, str):
        return _text_or_messages(only, None, where)
    raise DataError(
        f"{where} has no known field ({_FORMATS}); it has {_fields(row)}. Name the field with the"
        " text: --field"
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
            f"{where} is {type(value).__name__}, not text: choose another field with --field"
        )
    return Document(text=_valid_text(value, where))


def _completion(prompt: Any, completion: Any, tools: Any, where: str) -> Document:
    if isinstance(prompt, str) and isinstance(completion, str):
        return Document(
            pieces=((_valid_text(prompt, where), False), (_valid_text(completion, where), True))
        )
    if isinstance(prompt, list) and isinstance(completion, list):
        before = [{**message, "weight": 0} for message in prompt if isinstance(message, Mapping)]
        return _conversation([*before, *completion], tools, where)
    raise DataError(f"{where}: prompt and completion must both be texts, or both be messages")


def _valid_text(text: str, where: str) -> str:
    """Return the text; fail if it has a lone surrogate, which JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise DataError(f"{where} has a lone surrogate (U+{code:04X}): remove it") from None
    return text


def _rename_keys(turn: Any) -> Any:
    """Rename `from` and `value` to `role` and `content`."""
    if not isinstance(turn, Mapping) or "from" not in turn:
        return turn
    extra = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn.get("value"), **extra}


def _conversation(messages: Any, tools: Any, where: str) -> Document:
    try:
        checked = validate_messages([_drop_nulls(turn) for turn in _as_json(messages, where)])
    except UnspoolError as error:
        raise DataError(f"{where}: {error}") from None
    if not any(message["role"] == "assistant" for message in checked):
        raise DataError(f"{where} has no assistant message, so there is nothing to learn")
    tools = _as_json(tools, where) if tools else None
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where}: tools must be a list of function definitions")
    return Document(messages=checked, tools=tools)


def _as_json(value: Any, where: str) -> Any:
    """Return a list; tables often hold lists as JSON strings."""
    if not isinstance(value, str):
        return value if isinstance(value, list) else [value]
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"{where}: messages or tools are not valid JSON: {error}") from None


def _drop_nulls(message: Any) -> Any:
    """Drop the null values with which tables fill missing keys."""
    if not isinstance(message, Mapping):
        return message
    return {key: value for key, value in message.items() if value is not None or key == "content"}
