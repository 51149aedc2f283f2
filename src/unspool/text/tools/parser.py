"""Incremental parser of tool calls: splits a model's output into text and calls as it arrives.

    parser = ToolCallParser(format)                   # a ToolFormat of formats.py
    for step in steps:
        for piece in parser.push(step.token, step.text):
            ...                                       # TextPiece, ToolCallStart, ...
    pieces, calls = parser.finish(), parser.calls

Text passes immediately; only a possible beginning of a call is held back. A call is reported as
soon as it is certain, when its name is known and its arguments start; from then on the arguments
pass as they arrive. Text that looked like a call and is not one is returned unchanged.

The split into tokens does not matter. Each character is read once: returned text is not searched
again for calls inside it, so that parsing takes linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unspool.text.tools.call_parsers import (
    BLANK,
    GEMMA,
    PYTHON,
    QUOTE,
    JsonCallParser,
    LiteralCallParser,
    TaggedCallParser,
)

if TYPE_CHECKING:
    from unspool.text.tools.formats import ToolFormat, ToolSpec


@dataclass(frozen=True)
class TextPiece:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """Start of a tool call; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """Next part of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """End of a tool call."""

    index: int


Piece = TextPiece | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass(frozen=True)
class ParsedToolCall:
    """A tool call as the model wrote it."""

    name: str
    arguments: str  # JSON text
    is_complete: bool = True  # False if the text ended or became invalid inside the arguments


_HEAD = re.compile(r"\s*+([\w.:/-]{1,128})\s*+(\[CALL_ID\][\w-]*+)?\s*+(\[ARGS\])?\s*+")
_MAX_HEAD_CHARS = 256
_CHUNK = 1024  # characters read at a time, to limit the copying of long texts


class ToolCallParser:
    """Parses one text.

    If `names` is given, only calls of these functions are recognized. `tools` provide the schemas
    for formats that write arguments without quotes. `required` means that the text follows the
    format's grammar: blanks next to calls are not text.
    """

    has_stray_close = False  # only texts with reasoning can be, see `TagReasoningParser`

    def __init__(
        self,
        format: ToolFormat,
        *,
        required: bool = False,
        names: Collection[str] | None = None,
        tools: Sequence[ToolSpec] = (),
    ) -> None:
        self.calls: list[ParsedToolCall] = []
        self._format = format
        self._required = required
        self._names = names
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._controls = {token: mark for mark, token in format.controls.items()}
        # A mark that is a control token has no text: the same characters in the text are ordinary.
        # Only with the generic format, which is described in the prompt, they count as the mark.
        is_control = format.begin in format.controls and format.in_template
        self._begin = "" if is_control else format.begin
        self._pieces: list[Piece] = []
        self._out: list[str] = []  # the next piece: text, or arguments of the current call
        self._blanks: list[str] = []  # at an edge: part of the text if more text follows
        self._at_edge = True  # only blanks since the start or the last call
        self._partial_mark = ""  # text that may begin a mark
        self._raw: list[str] = []  # all text of a possible call
        self._head = ""  # a name before its arguments, in Mistral's newer format
        self._call: JsonCallParser | TaggedCallParser | LiteralCallParser = JsonCallParser()
        self._arguments: list[str] = []  # of that call
        self._in_call = False  # a call was reported and has not ended
        self._is_strict = False  # the call has no mark
        self._in_list = False
        self._tail = ""  # part of the end mark
        self._state: Callable[[str], None] | None = None  # None: in text

    def push(self, token: int, text: str) -> list[Piece]:
        """Parse a token's id, for control tokens, and the text that became certain with it."""
        for start in range(0, len(text), _CHUNK):
            self._read(text[start : start + _CHUNK])
        if token in self._controls:
            self._read_control(self._controls[token])
        return self._take_pieces()

    def finish(self) -> list[Piece]:
        """End the text: return the pieces held back; an incomplete call ends here."""
        if self._in_call:
            self._end_call(is_complete=False)
        elif self._raw:
            self._emit_as_text()
        if self._state is None:
            self._add_partial_mark()
            if not (self._required or self.calls):
                self._add_blanks()
        return self._take_pieces()

    # Output. Consecutive pieces of one kind are joined.

    def _take_pieces(self) -> list[Piece]:
        self._end_piece()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _end_piece(self) -> None:
        text = "".join(self._out)
        self._out = []
        if text and self._in_call:
            self._pieces.append(ToolCallArguments(len(self.calls), text))
        elif text:
            self._pieces.append(TextPiece(text))

    def _add_text(self, words: str) -> None:
        """Emit text, after the blanks held back before it."""
        if words:
            self._add_blanks()
            self._out.append(words)

    def _add_blanks(self) -> None:
        self._out += self._blanks
        self._blanks = []
        self._at_edge = False

    def _add_partial_mark(self) -> None:
        words, self._partial_mark = self._partial_mark, ""
        self._add_text(words)

    def _emit_as_text(self) -> None:
        """Emit the text of what turned out not to be a call."""
        raw, self._raw = "".join(self._raw), []
        self._add_text(raw)
        self._in_list = False
        self._state = None

    # Text.

    def _read(self, text: str) -> None:
        position = 0
        while position < len(text):
            if self._state is None:
                position = len(text) - len(self._read_words(text[position:]))
            else:
                self._state(text[position])
                position += 1

    def _read_words(self, text: str) -> str:
        """Emit text up to a possible call; return the remaining text."""
        if self._at_edge and not self._partial_mark:
            # Llama writes semicolons between calls.
            edge = BLANK + ";" if self._format.bare and self.calls else BLANK
            words = text.lstrip(edge)
            self._blanks.append(text[: len(text) - len(words)])
            if not words:
                return ""
            if self._format.bare and words[0] == "{":
                self._open("", strict=True)
                return words
            text = words
        pending = self._partial_mark + text
        mark_pos = pending.find(self._begin) if self._begin else -1
        if mark_pos >= 0:
            self._partial_mark = ""
            self._add_text(pending[:mark_pos])
            self._open(self._begin)
            return pending[mark_pos + len(self._begin) :]
        certain = len(pending) - mark_overlap(pending, self._begin)
        self._partial_mark = pending[certain:]
        self._add_text(pending[:certain])
        return ""

    def _read_control(self, mark: str) -> None:
        if mark in (self._format.begin, self._format.end):
            if self._in_call:
                self._end_call(is_complete=False)
                self._leave()
            elif self._raw:
                self._emit_as_text()
            elif self._state is None:
                self._add_partial_mark()
            else:
                self._leave()
            if mark == self._format.begin:
                self._open("")
        elif self._state == self._read_head:
            self._head += mark
        elif self._state == self._read_call and mark == QUOTE:
            self._read(mark)

    # A call: its mark, its JSON, the text after it. Each method takes one character.

    def _open(self, mark: str, *, strict: bool = False) -> None:
        self._raw = [mark]
        self._is_strict = strict
        self._in_list = False
        self._state = self._read_opened

    def _read_opened(self, character: str) -> None:
        """Read after the mark, or after a comma in a list of calls."""
        if character in BLANK:
            self._raw.append(character)
        elif (call := self._new_call(character)) is not None:
            self._call = call
            self._state = self._read_call
            self._read_call(character)
        elif character == "[" and not self._in_list:
            self._in_list = True
            self._raw.append(character)
        elif self._format.begin == "[TOOL_CALLS]" and not self._in_list:
            self._head = ""  # parse both of Mistral's formats, independent of the template
            self._state = self._read_head
            self._read_head(character)
        else:
            self._emit_as_text()
            self._read(character)

    def _new_call(
        self, character: str
    ) -> JsonCallParser | TaggedCallParser | LiteralCallParser | None:
        """Return the parser for a call that begins with this, None if no call does."""
        syntax, is_name = self._format.syntax, character.isalpha() or character == "_"
        if syntax == "tags" and character == "<":
            return TaggedCallParser(self._schemas)
        if syntax == "gemma" and is_name:
            return LiteralCallParser(GEMMA)
        if syntax == "python" and is_name:
            return LiteralCallParser(PYTHON)
        return JsonCallParser(strict=self._is_strict) if character == "{" else None

    def _read_head(self, character: str) -> None:
        """Read a name that is written before the JSON of its arguments."""
        match = _HEAD.fullmatch(self._head) if character == "{" else None
        if match is not None:
            self._call = JsonCallParser(match[1])
            self._state = self._read_call
            self._read_call(character)
        elif len(self._head) < _MAX_HEAD_CHARS and (
            character.isalnum() or character in "_.:/-[]" or character in BLANK
        ):
            self._head += character
            self._raw.append(character)
        else:
            self._emit_as_text()
            self._read(character)

    def _read_call(self, character: str) -> None:
        call = self._call
        is_reported = call.has_arguments and call.name is not None
        if not call.push(character) or not self._is_allowed(call.name):
            self._break(is_reported)
            self._read(character)
            return
        if is_reported:
            pass  # ignore other keys of the object
        elif call.is_certain:
            if not self._in_call:
                self._begin_call(call.name or "")
            self._arguments += call.fresh
            self._out += call.fresh
            call.fresh = []
            if call.has_arguments:
                self._end_call(is_complete=True)
        else:
            self._raw.append(character)
            if call.is_done and call.name is not None and not self._is_strict:
                self._begin_call(call.name)  # without arguments
                self._arguments, self._out = ["{}"], ["{}"]
                self._end_call(is_complete=True)
            elif call.is_done:
                self._emit_as_text()
                return
        if call.is_done:
            self._state = self._read_after_call

    def _is_allowed(self, name: str | None) -> bool:
        return name is None or (name != "" and (self._names is None or name in self._names))

    def _begin_call(self, name: str) -> None:
        self._end_piece()
        self._raw, self._blanks = [], []
        self._arguments = []
        self._in_call = True
        self._pieces.append(ToolCallStart(len(self.calls), name))

    def _end_call(self, *, is_complete: bool) -> None:
        self._end_piece()
        self._in_call = False
        self._pieces.append(ToolCallEnd(len(self.calls)))
        arguments = "".join(self._arguments)
        self.calls.append(ParsedToolCall(self._call.name or "", arguments, is_complete))

    def _break(self, is_reported: bool) -> None:
        """Leave the call at an unexpected character: it is text, or follows the call."""
        if is_reported:  # only the object around the arguments is not closed
            self._state = self._read_after_call
        elif self._in_call:
            self._end_call(is_complete=False)
            self._state = None
            self._at_edge = False
        else:
            self._emit_as_text()

    def _read_after_call(self, character: str) -> None:
        """Read after a call: the end mark, the next call of a list, or blanks."""
        end = self._format.end
        if self._tail or (end and character == end[0]):
            self._tail += character
            if self._tail == end:
                self._leave()
            elif not end.startswith(self._tail):
                tail, self._tail = self._tail, ""
                self._state, self._at_edge = None, True
                self._read(tail)
        elif character in BLANK:
            self._blanks.append(character)
        elif character == "," and self._in_list:
            self._raw = [","]
            self._state = self._read_opened
        elif character == "]" and self._in_list:
            self._in_list = False
        elif character != "}":  # one too many is a common mistake of models
            self._state, self._at_edge = None, True
            self._read(character)

    def _leave(self) -> None:
        """Return to text after a call and its end mark."""
        self._tail = ""
        self._blanks = []
        self._state, self._at_edge = None, True


def mark_overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of the text are a prefix of the mark."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
