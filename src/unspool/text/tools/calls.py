"""A model's text as it arrives, in two kinds of pieces: words for the reader, calls of functions.

    reader = ToolCallReader(format)                   # a ToolFormat of formats.py
    for step in steps:
        for piece in reader.push(step.token, step.text):
            ...                                       # TextPiece, CallBegun, CallArguments, ...
    pieces, calls = reader.finish(), reader.calls

Words pass at once; only what may begin a call is held back. A call is reported as soon as it is
certain, that is when its name is known and its arguments begin; from then on the arguments pass as
they come. What looked like a call and is none becomes text again, every character of it.

How the text was cut into tokens does not matter. Each character is looked at once: text that was
given back is not searched again for calls inside it (one may only begin where the wrong one ended),
so that no text takes more than linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from unspool.text.tools.call_literals import GEMMA, PYTHON, QUOTE, LiteralCall
from unspool.text.tools.call_object import CallObject
from unspool.text.tools.call_tags import TaggedCall
from unspool.text.tools.formats import Tool, ToolFormat
from unspool.text.tools.json_scan import BLANK

__all__ = [
    "CallArguments",
    "CallBegun",
    "CallEnded",
    "Piece",
    "TextPiece",
    "Tool",
    "ToolCall",
    "ToolCallReader",
]


@dataclass(frozen=True)
class TextPiece:
    """Words for the reader."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call of this function; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments: JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    """There is no more of this call."""

    index: int


Piece = TextPiece | CallBegun | CallArguments | CallEnded


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it."""

    name: str
    arguments: str  # JSON text
    is_complete: bool = True  # False where the text ended, or broke, inside the arguments


_HEAD = re.compile(r"\s*+([\w.:/-]{1,128})\s*+(\[CALL_ID\][\w-]*+)?\s*+(\[ARGS\])?\s*+")
_LONGEST_HEAD = 256
_CHUNK = 1024  # characters read at a time, so that copying the rest of a long text costs little


class ToolCallReader:
    """Reads one text. `names`, where given, are the only functions whose calls count; `tools` say
    what is a text among arguments that are written without quotes.

    `required` says that the text obeys the format's grammar: blanks beside calls are no text.
    """

    is_stray = False  # that is for texts with thoughts: see `thoughts/reader.py`

    def __init__(
        self,
        format: ToolFormat,
        *,
        required: bool = False,
        names: Collection[str] | None = None,
        tools: Sequence[Tool] = (),
    ) -> None:
        self.calls: list[ToolCall] = []
        self._format = format
        self._required = required
        self._names = names
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._controls = {token: mark for mark, token in format.controls.items()}
        # A mark that is a control token has no text: the same letters in the text are just letters.
        # Only a model that got its instructions in words (generic) may write the letters.
        is_control = format.begin in format.controls and format.in_template
        self._begin = "" if is_control else format.begin
        self._pieces: list[Piece] = []
        self._out: list[str] = []  # the next piece: words, or arguments of the call being read
        self._blanks: list[str] = []  # at an edge: text if words follow
        self._at_edge = True  # nothing but blanks since the start or the last call
        self._partial_mark = ""  # words that may begin a mark
        self._raw: list[str] = []  # all of what may turn out to be a call
        self._head = ""  # a name before its arguments, as in Mistral's newer way
        self._call: CallObject | TaggedCall | LiteralCall = CallObject()
        self._arguments: list[str] = []  # of that call
        self._in_call = False  # a call was reported and has not ended
        self._is_strict = False  # the call has no mark
        self._in_list = False
        self._tail = ""  # of the mark that ends a call
        self._state: Callable[[str], None] | None = None  # None: words

    def push(self, token: int, text: str) -> list[Piece]:
        """Take what became certain with a token: its id, for control tokens, and the text."""
        for start in range(0, len(text), _CHUNK):
            self._read(text[start : start + _CHUNK])
        if token in self._controls:
            self._read_control(self._controls[token])
        return self._take_pieces()

    def finish(self) -> list[Piece]:
        """No more will come: give what was held; a call that is not complete ends here."""
        if self._in_call:
            self._end_call(is_complete=False)
        elif self._raw:
            self._give_back()
        if self._state is None:
            self._add_partial_mark()
            if not (self._required or self.calls):
                self._add_blanks()
        return self._take_pieces()

    # What goes out. Pieces of a kind that follow each other are one.

    def _take_pieces(self) -> list[Piece]:
        self._end_piece()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _end_piece(self) -> None:
        text = "".join(self._out)
        self._out = []
        if text and self._in_call:
            self._pieces.append(CallArguments(len(self.calls), text))
        elif text:
            self._pieces.append(TextPiece(text))

    def _add_text(self, words: str) -> None:
        """Words, with the blanks that were held back before them."""
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

    def _give_back(self) -> None:
        """It was no call: all of it is text."""
        raw, self._raw = "".join(self._raw), []
        self._add_text(raw)
        self._in_list = False
        self._state = None

    # Words.

    def _read(self, text: str) -> None:
        place = 0
        while place < len(text):
            if self._state is None:
                place = len(text) - len(self._read_words(text[place:]))
            else:
                self._state(text[place])
                place += 1

    def _read_words(self, text: str) -> str:
        """Give out words up to where a call may begin; what is left behind that."""
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
        known = self._partial_mark + text
        found = known.find(self._begin) if self._begin else -1
        if found >= 0:
            self._partial_mark = ""
            self._add_text(known[:found])
            self._open(self._begin)
            return known[found + len(self._begin) :]
        certain = len(known) - overlap(known, self._begin)
        self._partial_mark = known[certain:]
        self._add_text(known[:certain])
        return ""

    def _read_control(self, mark: str) -> None:
        if mark in (self._format.begin, self._format.end):
            if self._in_call:
                self._end_call(is_complete=False)
                self._leave()
            elif self._raw:
                self._give_back()
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

    # A call: its mark, its JSON, what is behind it. Each of these takes one character.

    def _open(self, mark: str, *, strict: bool = False) -> None:
        self._raw = [mark]
        self._is_strict = strict
        self._in_list = False
        self._state = self._read_opened

    def _read_opened(self, character: str) -> None:
        """Behind the mark, or behind a comma in a list of calls."""
        if character in BLANK:
            self._raw.append(character)
        elif (begun := self._new_call(character)) is not None:
            self._call = begun
            self._state = self._read_call
            self._read_call(character)
        elif character == "[" and not self._in_list:
            self._in_list = True
            self._raw.append(character)
        elif self._format.begin == "[TOOL_CALLS]" and not self._in_list:
            self._head = ""  # both of Mistral's ways are read, whichever its template has
            self._state = self._read_head
            self._read_head(character)
        else:
            self._give_back()
            self._read(character)

    def _new_call(self, character: str) -> CallObject | TaggedCall | LiteralCall | None:
        """What reads a call that begins so; None: none does."""
        syntax, is_name = self._format.syntax, character.isalpha() or character == "_"
        if syntax == "tags" and character == "<":
            return TaggedCall(self._schemas)
        if syntax == "gemma" and is_name:
            return LiteralCall(GEMMA)
        if syntax == "python" and is_name:
            return LiteralCall(PYTHON)
        return CallObject(strict=self._is_strict) if character == "{" else None

    def _read_head(self, character: str) -> None:
        """A name that stands before its arguments, not in their JSON."""
        found = _HEAD.fullmatch(self._head) if character == "{" else None
        if found is not None:
            self._call = CallObject(found[1])
            self._state = self._read_call
            self._read_call(character)
        elif len(self._head) < _LONGEST_HEAD and (
            character.isalnum() or character in "_.:/-[]" or character in BLANK
        ):
            self._head += character
            self._raw.append(character)
        else:
            self._give_back()
            self._read(character)

    def _read_call(self, character: str) -> None:
        call = self._call
        is_reported = call.has_arguments and call.name is not None
        if not call.take(character) or not self._is_allowed(call.name):
            self._break(is_reported)
            self._read(character)
            return
        if is_reported:
            pass  # what else the object holds is nobody's
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
                self._give_back()
                return
        if call.is_done:
            self._state = self._read_behind

    def _is_allowed(self, name: str | None) -> bool:
        return name is None or (name != "" and (self._names is None or name in self._names))

    def _begin_call(self, name: str) -> None:
        self._end_piece()
        self._raw, self._blanks = [], []
        self._arguments = []
        self._in_call = True
        self._pieces.append(CallBegun(len(self.calls), name))

    def _end_call(self, *, is_complete: bool) -> None:
        self._end_piece()
        self._in_call = False
        self._pieces.append(CallEnded(len(self.calls)))
        arguments = "".join(self._arguments)
        self.calls.append(ToolCall(self._call.name or "", arguments, is_complete))

    def _break(self, is_reported: bool) -> None:
        """What comes does not belong to the call: it is text, or is behind the call."""
        if is_reported:  # only the object around the arguments is not closed
            self._state = self._read_behind
        elif self._in_call:
            self._end_call(is_complete=False)
            self._state = None
            self._at_edge = False
        else:
            self._give_back()

    def _read_behind(self, character: str) -> None:
        """Behind a call: the mark that ends it, the next one of a list, or blanks."""
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
        elif character != "}":  # one too many is a common slip
            self._state, self._at_edge = None, True
            self._read(character)

    def _leave(self) -> None:
        """The call and its mark are over."""
        self._tail = ""
        self._blanks = []
        self._state, self._at_edge = None, True


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of the text begin the mark."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
