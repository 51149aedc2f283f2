"""What an answer is read into: the pieces of `tools/calls.py`, and those of thoughts."""

from __future__ import annotations

from dataclasses import dataclass

from unspool.text.tools.calls import Piece


@dataclass(frozen=True)
class ThoughtPiece:
    """What the model says to itself."""

    text: str


AnswerPiece = Piece | ThoughtPiece
