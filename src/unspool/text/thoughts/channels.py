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

from unspool.text.thoughts.formats import CHANNEL, END, MESSAGE, START, Start, ThoughtFormat
from unspool.text.thoughts.pieces import AnswerPiece, ThoughtPiece
from unspool.text.tools.call_object import CallObject
from unspool.text.tools.calls import CallArguments, CallBegun, CallEnded, TextPiece, ToolCall

_FUNCTION = re.compile(r"to=functions\.([\w.:/-]{1,128}?)(?=$|[\s<])")
_RECIPIENT = re.compile(r"\bto=\S")


class ChannelReader:
    """Parses one text. With `calls_count`, a message to a function is a tool call, else text."""

    is_stray = False

    def __init__(self, format: ThoughtFormat, start: Start, *, calls_count: bool) -> None:
        self.calls: list[ToolCall] = []
        self._marks = {token: mark for mark, token in format.ids.items()}
        self._parse_calls = calls_count
        self._header: str | None = start.header if start.place == "before" else None
        self._kind = "thought" if start.place == "inside" else "words"
        self._name = ""  # function that the message calls
        self._call: CallObject | None = None
        self._arguments: list[str] = []
        self._has_text = False  # of the current message
        self._previous_kinds: set[str] = set()

    @property
    def in_thought(self) -> bool:
        return self._header is None and self._kind == "thought"

    @property
    def is_inside(self) -> bool:
        """Whether the next token is not part of the answer: reasoning or a header."""
        return self._header is not None or self._kind == "thought"

    is_aside = is_inside  # the same for the last token

    def push(self, token: int, text: str) -> list[AnswerPiece]:
        """Parse a token's id and the text that became certain with it."""
        mark = self._marks.get(token)
        if mark is not None and text.endswith(mark):  # in some vocabularies marks have a text
            text = text[: -len(mark)]
        pieces: list[AnswerPiece] = self._read(text) if text else []
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

    def finish(self) -> list[AnswerPiece]:
        """End the text, and a tool call with it."""
        return self._end() if self._header is None else []

    def _begin(self) -> list[AnswerPiece]:
        """Begin a message after its header."""
        header, self._header, self._has_text = self._header or "", None, False
        function = _FUNCTION.search(header)
        if function is not None and self._parse_calls:
            self._kind, self._name, self._arguments = "call", function[1], []
            self._call = CallObject(self._name)
            return [CallBegun(len(self.calls), self._name)]
        channel = header.rpartition(CHANNEL)[2].strip()
        # A message to a built-in tool (to=python) is not part of the answer.
        is_reasoning = channel.startswith("analysis") or (
            _RECIPIENT.search(header) is not None and function is None
        )
        self._kind = "thought" if is_reasoning else "words"
        return []

    def _read(self, text: str) -> list[AnswerPiece]:
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
        return [ThoughtPiece(text) if self._kind == "thought" else TextPiece(text)]

    def _read_call(self, text: str) -> list[AnswerPiece]:
        call = self._call
        if call is None:
            return []  # after invalid JSON
        for character in text:
            if call.is_done or not call.push(character):
                self._call = call if call.is_done else None
                break
        fresh, call.fresh = "".join(call.fresh), []
        self._arguments.append(fresh)
        return [CallArguments(len(self.calls), fresh)] if fresh else []

    def _end(self) -> list[AnswerPiece]:
        """End the message."""
        if self._header is not None or self._kind != "call":
            return []
        is_complete = self._call is not None and self._call.is_done
        self.calls.append(ToolCall(self._name, "".join(self._arguments), is_complete))
        self._kind = "words"
        return [CallEnded(len(self.calls) - 1)]
