"""Incremental parser for reasoning between two marks.

Text passes immediately; only a possible beginning of a mark is held back. An open mark written as
ordinary text is recognized only where reasoning may begin, so that a quoted one stays text; a mark
that is a control token is recognized anywhere. Whitespace between marks and text is dropped.

A close mark without an open one means that all text before it was reasoning: some models omit the
open mark. In a stream that is too late to correct; for a complete text `is_stray` says to parse
again from `Start("inside")`.
"""

from __future__ import annotations

from unspool.text.thoughts.formats import OutputStart, ReasoningFormat
from unspool.text.thoughts.pieces import ReasoningPiece
from unspool.text.tools.calls import TextPiece, mark_overlap


class TagReasoningParser:
    """Parses one text."""

    def __init__(self, format: ReasoningFormat, start: OutputStart) -> None:
        self.in_reasoning = start.state == "inside"
        self.has_stray_close = False
        self._format = format
        self._had_mark = start.state != "before"
        self._at_edge = True  # only blanks since the start or the last reasoning block
        self._pending = ""  # a possible beginning of a mark, or blanks at an edge
        self._head = "" if start.state == "inside" else format.head  # still to be dropped
        self._blanks = ""  # at the end of reasoning: part of it if more follows
        self._has_text = False  # of the current reasoning block
        self._has_reasoning = False  # of any block
        self._was_closed = False  # a block was closed
        self._after_turn = False
        # A mark that is a control token has no text: the same characters in a text are ordinary.
        self._open = "" if format.open in format.controls else format.open
        self._close = "" if format.close in format.controls else format.close
        self._marks = {
            token: mark for mark, token in format.controls.items()
            if mark in (format.open, format.close)
        }  # fmt: skip

    @property
    def next_is_reasoning(self) -> bool:
        """Whether the next token is not part of the answer."""
        return self.in_reasoning

    @property
    def last_is_reasoning(self) -> bool:
        """Whether the last token is not part of the answer: reasoning, or blanks after it."""
        return self.in_reasoning or (self._at_edge and self._was_closed)

    def push(self, token: int, text: str) -> list[ReasoningPiece | TextPiece]:
        """Parse a token's id, for control tokens, and the text that became certain with it."""
        pieces: list[ReasoningPiece | TextPiece] = []
        opens = self._after_turn and token == self._format.ids.get(self._format.open)
        if opens and text.endswith(self._open):
            text = text[: len(text) - len(self._open)]
        remaining, self._pending = self._pending + text, ""
        while remaining:
            remaining = self._read(remaining, pieces)
        mark = self._format.open if opens else self._marks.get(token)
        if mark is not None:
            self._release(pieces)
            if mark == self._format.open:
                self._enter()
            elif self.in_reasoning:
                self._leave()
            elif not self._had_mark:
                self._note_stray()
        return pieces

    def end_turn(self) -> None:
        """Note that another turn follows in the same text, where reasoning may begin again."""
        self.in_reasoning, self._after_turn = False, True

    def finish(self) -> list[ReasoningPiece | TextPiece]:
        """End the text; return the pieces held back."""
        pieces: list[ReasoningPiece | TextPiece] = []
        self._release(pieces)
        return pieces

    def _release(self, pieces: list[ReasoningPiece | TextPiece]) -> None:
        """Emit the text held back: it begins no mark."""
        pending, self._pending = self._pending, ""
        if self.in_reasoning:
            self._head = ""
            self._add_thought(pending, pieces)
        elif pending and not (self._had_mark and self._at_edge and not pending.strip()):
            self._at_edge = False
            pieces.append(TextPiece(pending))

    def _read(self, text: str, pieces: list[ReasoningPiece | TextPiece]) -> str:
        """Parse until the state changes; return the remaining text."""
        if self.in_reasoning:
            return self._read_thought(text, pieces)
        return self._read_edge(text) if self._at_edge else self._read_words(text, pieces)

    def _read_thought(self, text: str, pieces: list[ReasoningPiece | TextPiece]) -> str:
        if self._head:
            if text.startswith(self._head):
                text, self._head = text[len(self._head) :], ""
            elif self._head.startswith(text):
                self._pending = text
                return ""
            self._head = ""
        close_pos = text.find(self._close) if self._close else -1
        if close_pos >= 0:
            self._add_thought(text[:close_pos], pieces)
            self._leave()
            return text[close_pos + len(self._close) :]
        certain = len(text) - mark_overlap(text, self._close)
        self._pending = text[certain:]
        self._add_thought(text[:certain], pieces)
        return ""

    def _read_edge(self, text: str) -> str:
        words = text.lstrip()
        if self._open and words.startswith(self._open):
            self._enter()
            return words[len(self._open) :]
        if not words or (self._open and self._open.startswith(words)):
            self._pending = text
            return ""
        self._at_edge = False
        return words if self._had_mark else text

    def _read_words(self, text: str, pieces: list[ReasoningPiece | TextPiece]) -> str:
        mark = "" if self._had_mark else self._close
        mark_pos = text.find(mark) if mark else -1
        certain = mark_pos if mark_pos >= 0 else len(text) - mark_overlap(text, mark)
        if text[:certain]:
            pieces.append(TextPiece(text[:certain]))
        if mark_pos >= 0:
            self._note_stray()
            return text[mark_pos + len(mark) :]
        self._pending = text[certain:]
        return ""

    def _enter(self) -> None:
        self.in_reasoning = self._had_mark = True
        self._head = self._format.head
        self._has_text, self._blanks = False, ""

    def _leave(self) -> None:
        self.in_reasoning, self._at_edge, self._was_closed = False, True, True

    def _note_stray(self) -> None:
        self.has_stray_close = self._had_mark = self._at_edge = True

    def _add_thought(self, text: str, pieces: list[ReasoningPiece | TextPiece]) -> None:
        text = self._blanks + text if self._has_text else text.lstrip()
        words = text.rstrip()
        self._blanks = text[len(words) :]
        if not words:
            return
        if self._has_reasoning and not self._has_text:  # two blocks are two paragraphs
            words = f"\n\n{words}"
        self._has_text = self._has_reasoning = True
        pieces.append(ReasoningPiece(words))
