"""Messages in channels (OpenAI's harmony), read as they arrive.

    <|channel|>analysis<|message|>The user greets.<|end|>
    <|start|>assistant<|channel|>final<|message|>Hello!<|return|>

A header says in which channel a message is and whom it goes to; `<|message|>` ends the header, and
`<|end|>`, `<|call|>` or `<|return|>` the message. `analysis` is thought; `final` is for the reader,
and so is `commentary`, unless it goes to a function: `to=functions.weather` is a call, and the
message holds its arguments in JSON.
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
    """Reads one text. `calls_count` says whether a message to a function is a call; else it is
    for the reader, as it stands."""

    is_stray = False

    def __init__(self, format: ThoughtFormat, start: Start, *, calls_count: bool) -> None:
        self.calls: list[ToolCall] = []
        self._marks = {token: mark for mark, token in format.ids.items()}
        self._calls_count = calls_count
        self._header: str | None = start.header if start.place == "before" else None
        self._kind = "thought" if start.place == "inside" else "words"
        self._name = ""  # of the function that the message goes to
        self._call: CallObject | None = None
        self._arguments: list[str] = []
        self._is_begun = False  # the message has words
        self._told: set[str] = set()  # kinds of messages that came before

    @property
    def in_thought(self) -> bool:
        return self._header is None and self._kind == "thought"

    @property
    def is_inside(self) -> bool:
        """Whether what comes next is no part of the answer: thoughts, and headers."""
        return self._header is not None or self._kind == "thought"

    is_aside = is_inside  # and so was what came last

    def push(self, token: int, text: str) -> list[AnswerPiece]:
        """Take a token's id and the text that became certain with it."""
        mark = self._marks.get(token)
        if mark is not None and text.endswith(mark):  # a vocabulary in which marks have a text
            text = text[: -len(mark)]
        pieces: list[AnswerPiece] = self._read(text) if text else []
        if mark == MESSAGE:
            pieces += self._begin()
        elif mark in (START, END):
            pieces += self._end()
            self._header = ""
        elif mark == CHANNEL:
            if self._header is None:  # a header of a message that was not begun by a mark
                pieces += self._end()
            self._header = (self._header or "") + CHANNEL
        return pieces

    def end_turn(self) -> None:
        """Another turn follows in the same text; its header says what it is."""

    def finish(self) -> list[AnswerPiece]:
        """No more will come; the mark that ends a call ends the text, too."""
        return self._end() if self._header is None else []

    def _begin(self) -> list[AnswerPiece]:
        """The header is over: what follows is said in its channel."""
        header, self._header, self._is_begun = self._header or "", None, False
        function = _FUNCTION.search(header)
        if function is not None and self._calls_count:
            self._kind, self._name, self._arguments = "call", function[1], []
            self._call = CallObject(self._name)
            return [CallBegun(len(self.calls), self._name)]
        channel = header.rpartition(CHANNEL)[2].strip()
        # What goes to a tool of the model's own (to=python) is no answer.
        aside = channel.startswith("analysis") or (
            _RECIPIENT.search(header) is not None and function is None
        )
        self._kind = "thought" if aside else "words"
        return []

    def _read(self, text: str) -> list[AnswerPiece]:
        if self._header is not None:
            self._header += text
            return []
        if self._kind == "call":
            return self._read_call(text)
        if not self._is_begun:
            text = text.lstrip()
            if not text:
                return []
            if self._kind in self._told:  # two messages of a kind are two paragraphs
                text = f"\n\n{text}"
            self._is_begun = True
            self._told.add(self._kind)
        return [ThoughtPiece(text) if self._kind == "thought" else TextPiece(text)]

    def _read_call(self, text: str) -> list[AnswerPiece]:
        call = self._call
        if call is None:
            return []  # behind what is no JSON any more
        for character in text:
            if call.is_done or not call.take(character):
                self._call = call if call.is_done else None
                break
        fresh, call.fresh = "".join(call.fresh), []
        self._arguments.append(fresh)
        return [CallArguments(len(self.calls), fresh)] if fresh else []

    def _end(self) -> list[AnswerPiece]:
        """The message is over."""
        if self._header is not None or self._kind != "call":
            return []
        is_complete = self._call is not None and self._call.is_done
        self.calls.append(ToolCall(self._name, "".join(self._arguments), is_complete))
        self._kind = "words"
        return [CallEnded(len(self.calls) - 1)]
