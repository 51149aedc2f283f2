"""Pieces of a parsed output: text, tool calls (`tools/calls.py`) and reasoning."""

from __future__ import annotations

from dataclasses import dataclass

from unspool.text.tools.calls import Piece


@dataclass(frozen=True)
class ReasoningPiece:
    """Reasoning text."""

    text: str


OutputPiece = Piece | ReasoningPiece
