"""Incremental parser for OpenAI's harmony format: messages in channels.

    <|channel|>analysis<|message|>The user greets.<|end|>
    <|start|>assistant<|channel|>final<|message|>Hello!<|return|>

A header names the channel and the recipient of a message; `<|message|>` ends the header, and
`<|end|>`, `<|call|>` or `<|return|>` ends the message. `analysis` is reasoning; `final` and
`commentary` are text for the user, unless the recipient is a function: `to=functions.weather` is a
tool call, and the message contains its arguments in JSON.
"""

from __future__ import annotations

import re

from unspool.text.thoughts.formats import CHANNEL, END, MESSAGE, START, OutputStart, ReasoningFormat
from unspool.text.thoughts.pieces import OutputPiece, ReasoningPiece
from unspool.text.tools.call_object import JsonCallParser
from unspool.text.tools.calls import (
    ParsedToolCall,
    TextPiece,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

_FUNCTION = re.compile(r"to=functions\.([\w.:/-]{1,128}?)(?=$|[\s<])")
_RECIPIENT = re.compile(r"\bto=\S")


class HarmonyParser:
    """Parses one text. With `parse_calls`, a message to a function is a tool call, else text."""

    has_stray_close = False

    def __init__(self, format: ReasoningFormat, start: OutputStart, *, parse_calls: bool) -> None:
        self.calls: list[ParsedToolCall] = []
        self._marks = {token: mark for mark, token in format.ids.items()}
        self._parse_calls = parse_calls
        self._header: str | None = start.header if start.state == "before" else None
        self._kind = "thought" if start.state == "inside" else "words"
        self._name = ""  # function that the message calls
        self._call: JsonCallParser | None = None
        self._arguments: list[str] = []
        self._has_text = False  # of the current message
        self._previous_kinds: set[str] = set()

    @property
    def in_reasoning(self) -> bool:
        return self._header is None and self._kind == "thought"

    @property
    def next_is_reasoning(self) -> bool:
        """Whether the next token is not part of the answer: reasoning or a header."""
        return self._header is not None or self._kind == "thought"

    last_is_reasoning = next_is_reasoning  # the same for the last token

    def push(self, token: int, text: str) -> list[OutputPiece]:
        """Parse a token's id and the text that became certain with it."""
        mark = self._marks.get(token)
        if mark is not None and text.endswith(mark):  # in some vocabularies marks have a text
            text = text[: -len(mark)]
        pieces: list[OutputPiece] = self._read(text) if text else []
        if mark == MESSAGE:
            pieces += self._begin()
        elif mark in (START, END):
            pieces += self._end()
            self._header = ""
        elif mark == CHANNEL:
            if self._header is None:  # a header without <|start|>
                pieces += self._end()
            self._header = (self._header or "") + CHANNEL
        return pieces

    def end_turn(self) -> None:
        """Do nothing: the header of the next turn says what it is."""

    def finish(self) -> list[OutputPiece]:
        """End the text, and a tool call with it."""
        return self._end() if self._header is None else []

    def _begin(self) -> list[OutputPiece]:
        """Begin a message after its header."""
        header, self._header, self._has_text = self._header or "", None, False
        function = _FUNCTION.search(header)
        if function is not None and self._parse_calls:
            self._kind, self._name, self._arguments = "call", function[1], []
            self._call = JsonCallParser(self._name)
            return [ToolCallStart(len(self.calls), self._name)]
        channel = header.rpartition(CHANNEL)[2].strip()
        # A message to a built-in tool (to=python) is not part of the answer.
        is_reasoning = channel.startswith("analysis") or (
            _RECIPIENT.search(header) is not None and function is None
        )
        self._kind = "thought" if is_reasoning else "words"
        return []

    def _read(self, text: str) -> list[OutputPiece]:
        if self._header is not None:
            self._header += text
            return []
        if self._kind == "call":
            return self._read_call(text)
        if not self._has_text:
            text = text.lstrip()
            if not text:
                return []
            if self._kind in self._previous_kinds:  # two messages of a kind are two paragraphs
                text = f"\n\n{text}"
            self._has_text = True
            self._previous_kinds.add(self._kind)
        return [ReasoningPiece(text) if self._kind == "thought" else TextPiece(text)]

    def _read_call(self, text: str) -> list[OutputPiece]:
        call = self._call
        if call is None:
            return []  # after invalid JSON
        for character in text:
            if call.is_done or not call.push(character):
                self._call = call if call.is_done else None
                break
        fresh, call.fresh = "".join(call.fresh), []
        self._arguments.append(fresh)
        return [ToolCallArguments(len(self.calls), fresh)] if fresh else []

    def _end(self) -> list[OutputPiece]:
        """End the message."""
        if self._header is not None or self._kind != "call":
            return []
        is_complete = self._call is not None and self._call.is_done
        self.calls.append(ParsedToolCall(self._name, "".join(self._arguments), is_complete))
        self._kind = "words"
        return [ToolCallEnd(len(self.calls) - 1)]
