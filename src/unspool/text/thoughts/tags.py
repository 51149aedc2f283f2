"""Thoughts between two marks, told apart from the answer as they arrive.

Text passes at once; only what may begin a mark is held back. An open mark in letters counts only
where an answer or the next thought may begin, so that one which is quoted stays text; a mark that
is a control token counts anywhere. Blanks between the marks and what they enclose belong to
nobody.

A close mark without an open one says that all before it was a thought: some models leave the open
mark out. In a stream that comes too late; `is_stray` tells whoever reads a whole text, who begins
again with `Start("inside")`.
"""

from __future__ import annotations

from unspool.text.thoughts.formats import Start, ThoughtFormat
from unspool.text.thoughts.pieces import ThoughtPiece
from unspool.text.tools.calls import TextPiece, overlap


class TagReader:
    """Reads one text."""

    def __init__(self, format: ThoughtFormat, start: Start) -> None:
        self.in_thought = start.place == "inside"
        self.is_stray = False
        self._format = format
        self._seen = start.place != "before"  # a thought, or where one was closed
        self._at_edge = True  # nothing but blanks since the start or the last thought
        self._held = ""  # what may begin a mark, or blanks at an edge
        self._head = "" if start.place == "inside" else format.head  # still to be left out
        self._blanks = ""  # at the end of a thought: part of it if more comes
        self._is_begun = False  # the thought has words
        self._has_words = False  # some thought has
        self._had_thought = False  # one was closed
        self._after_turn = False
        # A mark that is a control token has no text: its letters in a text are just letters.
        self._open = "" if format.open in format.controls else format.open
        self._close = "" if format.close in format.controls else format.close
        self._marks = {
            token: mark for mark, token in format.controls.items()
            if mark in (format.open, format.close)
        }  # fmt: skip

    @property
    def is_inside(self) -> bool:
        """Whether what comes next is no part of the answer, whatever it is."""
        return self.in_thought

    @property
    def is_aside(self) -> bool:
        """Whether what came last is no part of the answer: a thought, or blanks behind one."""
        return self.in_thought or (self._at_edge and self._had_thought)

    def push(self, token: int, text: str) -> list[ThoughtPiece | TextPiece]:
        """Take a token's id, for control tokens, and the text that became certain with it."""
        pieces: list[ThoughtPiece | TextPiece] = []
        opens = self._after_turn and token == self._format.ids.get(self._format.open)
        if opens and text.endswith(self._open):
            text = text[: len(text) - len(self._open)]
        rest, self._held = self._held + text, ""
        while rest:
            rest = self._read(rest, pieces)
        mark = self._format.open if opens else self._marks.get(token)
        if mark is not None:
            self._release(pieces)
            if mark == self._format.open:
                self._enter()
            elif self.in_thought:
                self._leave()
            elif not self._seen:
                self._note_stray()
        return pieces

    def end_turn(self) -> None:
        """Another turn follows in the same text: there a thought may begin behind words."""
        self.in_thought, self._after_turn = False, True

    def finish(self) -> list[ThoughtPiece | TextPiece]:
        """No more will come."""
        pieces: list[ThoughtPiece | TextPiece] = []
        self._release(pieces)
        return pieces

    def _release(self, pieces: list[ThoughtPiece | TextPiece]) -> None:
        """What was held begins no mark."""
        held, self._held = self._held, ""
        if self.in_thought:
            self._head = ""
            self._add_thought(held, pieces)
        elif held and not (self._seen and self._at_edge and not held.strip()):
            self._at_edge = False
            pieces.append(TextPiece(held))

    def _read(self, text: str, pieces: list[ThoughtPiece | TextPiece]) -> str:
        """Read as far as the state stays the same; what is left."""
        if self.in_thought:
            return self._read_thought(text, pieces)
        return self._read_edge(text) if self._at_edge else self._read_words(text, pieces)

    def _read_thought(self, text: str, pieces: list[ThoughtPiece | TextPiece]) -> str:
        if self._head:
            if text.startswith(self._head):
                text, self._head = text[len(self._head) :], ""
            elif self._head.startswith(text):
                self._held = text
                return ""
            self._head = ""
        found = text.find(self._close) if self._close else -1
        if found >= 0:
            self._add_thought(text[:found], pieces)
            self._leave()
            return text[found + len(self._close) :]
        certain = len(text) - overlap(text, self._close)
        self._held = text[certain:]
        self._add_thought(text[:certain], pieces)
        return ""

    def _read_edge(self, text: str) -> str:
        words = text.lstrip()
        if self._open and words.startswith(self._open):
            self._enter()
            return words[len(self._open) :]
        if not words or (self._open and self._open.startswith(words)):
            self._held = text
            return ""
        self._at_edge = False
        return words if self._seen else text

    def _read_words(self, text: str, pieces: list[ThoughtPiece | TextPiece]) -> str:
        mark = "" if self._seen else self._close
        found = text.find(mark) if mark else -1
        certain = found if found >= 0 else len(text) - overlap(text, mark)
        if text[:certain]:
            pieces.append(TextPiece(text[:certain]))
        if found >= 0:
            self._note_stray()
            return text[found + len(mark) :]
        self._held = text[certain:]
        return ""

    def _enter(self) -> None:
        self.in_thought = self._seen = True
        self._head = self._format.head
        self._is_begun, self._blanks = False, ""

    def _leave(self) -> None:
        self.in_thought, self._at_edge, self._had_thought = False, True, True

    def _note_stray(self) -> None:
        self.is_stray = self._seen = self._at_edge = True

    def _add_thought(self, text: str, pieces: list[ThoughtPiece | TextPiece]) -> None:
        text = self._blanks + text if self._is_begun else text.lstrip()
        words = text.rstrip()
        self._blanks = text[len(words) :]
        if not words:
            return
        if self._has_words and not self._is_begun:  # two thoughts are two paragraphs
            words = f"\n\n{words}"
        self._is_begun = self._has_words = True
        pieces.append(ThoughtPiece(words))
