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

from unspool.text.thoughts.channels import HarmonyParser
from unspool.text.thoughts.formats import OutputStart, ReasoningFormat
from unspool.text.thoughts.pieces import OutputPiece, ReasoningPiece
from unspool.text.thoughts.tags import TagReasoningParser
from unspool.text.tools.calls import ParsedToolCall, TextPiece, ToolCallParser


class OutputParser(Protocol):
    """Incremental parser of a model's output."""

    @property
    def calls(self) -> list[ParsedToolCall]: ...

    @property
    def has_stray_close(self) -> bool:
        """Whether a close mark came without an open one: all text before it was reasoning."""

    def push(self, token: int, text: str) -> Sequence[OutputPiece]: ...
    def finish(self) -> Sequence[OutputPiece]: ...


class _TaggedOutputParser:
    """Parses reasoning between marks and passes other text to the tool call parser."""

    def __init__(self, thoughts: TagReasoningParser, inner: ToolCallParser | None) -> None:
        self._thoughts, self._inner = thoughts, inner

    @property
    def calls(self) -> list[ParsedToolCall]:
        return self._inner.calls if self._inner is not None else []

    @property
    def has_stray_close(self) -> bool:
        return self._thoughts.has_stray_close

    def push(self, token: int, text: str) -> list[OutputPiece]:
        was_thought = self._thoughts.in_reasoning
        pieces = self._outside(self._thoughts.push(token, text))
        if self._inner is not None and not (was_thought or self._thoughts.in_reasoning):
            pieces += self._inner.push(token, "")
        return pieces

    def finish(self) -> list[OutputPiece]:
        pieces = self._outside(self._thoughts.finish())
        return [*pieces, *(self._inner.finish() if self._inner is not None else ())]

    def _outside(self, pieces: Iterable[ReasoningPiece | TextPiece]) -> list[OutputPiece]:
        parsed: list[OutputPiece] = []
        for piece in pieces:
            if self._inner is None or isinstance(piece, ReasoningPiece):
                parsed.append(piece)
            else:
                parsed += self._inner.push(-1, piece.text)
        return parsed


def make_output_parser(
    format: ReasoningFormat | None, start: OutputStart, calls: ToolCallParser | None
) -> OutputParser | None:
    """Return the parser for an output, None if it can only be text."""
    if format is not None and format.uses_channels:
        return HarmonyParser(format, start, parse_calls=calls is not None)
    if format is not None:
        return _TaggedOutputParser(TagReasoningParser(format, start), calls)
    return calls


def split_reasoning(reader: OutputParser, output: Iterable[tuple[int, str]]) -> tuple[str, str]:
    """Split a complete output of (token, text) pairs into reasoning and answer."""
    pieces = [piece for token, text in output for piece in reader.push(token, text)]
    pieces += reader.finish()
    reasoning = [piece.text for piece in pieces if isinstance(piece, ReasoningPiece)]
    answer = [piece.text for piece in pieces if isinstance(piece, TextPiece)]
    return "".join(reasoning), "".join(answer)
