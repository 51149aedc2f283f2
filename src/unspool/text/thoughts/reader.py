"""Parse an output as it arrives into reasoning, text and tool calls.

    reader = answer_reader(format, start, ToolCallReader(tools))
    for step in steps:
        for piece in reader.push(step.token, step.text):
            ...                            # ThoughtPiece, TextPiece, CallBegun, CallArguments, ...
    pieces = reader.finish()

Python API, command line and server share this parser. Tool calls are recognized outside of
reasoning only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from unspool.text.thoughts.channels import ChannelReader
from unspool.text.thoughts.formats import Start, ThoughtFormat
from unspool.text.thoughts.pieces import AnswerPiece, ThoughtPiece
from unspool.text.thoughts.tags import TagReader
from unspool.text.tools.calls import TextPiece, ToolCall, ToolCallReader


class AnswerReader(Protocol):
    """Incremental parser of a model's output."""

    @property
    def calls(self) -> list[ToolCall]: ...

    @property
    def is_stray(self) -> bool:
        """Whether a close mark came without an open one: all text before it was reasoning."""

    def push(self, token: int, text: str) -> Sequence[AnswerPiece]: ...
    def finish(self) -> Sequence[AnswerPiece]: ...


class _Tagged:
    """Parses reasoning between marks and passes other text to the tool call parser."""

    def __init__(self, thoughts: TagReader, inner: ToolCallReader | None) -> None:
        self._thoughts, self._inner = thoughts, inner

    @property
    def calls(self) -> list[ToolCall]:
        return self._inner.calls if self._inner is not None else []

    @property
    def is_stray(self) -> bool:
        return self._thoughts.is_stray

    def push(self, token: int, text: str) -> list[AnswerPiece]:
        was_thought = self._thoughts.in_thought
        pieces = self._outside(self._thoughts.push(token, text))
        if self._inner is not None and not (was_thought or self._thoughts.in_thought):
            pieces += self._inner.push(token, "")
        return pieces

    def finish(self) -> list[AnswerPiece]:
        pieces = self._outside(self._thoughts.finish())
        return [*pieces, *(self._inner.finish() if self._inner is not None else ())]

    def _outside(self, pieces: Iterable[ThoughtPiece | TextPiece]) -> list[AnswerPiece]:
        parsed: list[AnswerPiece] = []
        for piece in pieces:
            if self._inner is None or isinstance(piece, ThoughtPiece):
                parsed.append(piece)
            else:
                parsed += self._inner.push(-1, piece.text)
        return parsed


def answer_reader(
    format: ThoughtFormat | None, start: Start, calls: ToolCallReader | None
) -> AnswerReader | None:
    """Return the parser for an output, None if it can only be text."""
    if format is not None and format.channels:
        return ChannelReader(format, start, calls_count=calls is not None)
    if format is not None:
        return _Tagged(TagReader(format, start), calls)
    return calls


def told_apart(reader: AnswerReader, output: Iterable[tuple[int, str]]) -> tuple[str, str]:
    """Split a complete output of (token, text) pairs into reasoning and answer."""
    pieces = [piece for token, text in output for piece in reader.push(token, text)]
    pieces += reader.finish()
    reasoning = [piece.text for piece in pieces if isinstance(piece, ThoughtPiece)]
    answer = [piece.text for piece in pieces if isinstance(piece, TextPiece)]
    return "".join(reasoning), "".join(answer)
