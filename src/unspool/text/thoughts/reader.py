"""An answer as it arrives: thoughts, words for the reader, and calls of functions.

    reader = answer_reader(format, start, ToolCallReader(tools))
    for step in steps:
        for piece in reader.push(step.token, step.text):
            ...                            # ThoughtPiece, TextPiece, CallBegun, CallArguments, ...
    pieces = reader.finish()

The one reader that Python, the command line and the server share. Calls are looked for outside of
thoughts only.
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
    """Takes what arrives, gives what it is."""

    @property
    def calls(self) -> list[ToolCall]: ...

    @property
    def is_stray(self) -> bool:
        """Whether a thought was closed that was never opened: all before it was one."""

    def push(self, token: int, text: str) -> Sequence[AnswerPiece]: ...
    def finish(self) -> Sequence[AnswerPiece]: ...


class _Tagged:
    """Thoughts between marks; the words outside go on to who looks for calls."""

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
        found = self._outside(self._thoughts.push(token, text))
        if self._inner is not None and not (was_thought or self._thoughts.in_thought):
            found += self._inner.push(token, "")
        return found

    def finish(self) -> list[AnswerPiece]:
        found = self._outside(self._thoughts.finish())
        return [*found, *(self._inner.finish() if self._inner is not None else ())]

    def _outside(self, pieces: Iterable[ThoughtPiece | TextPiece]) -> list[AnswerPiece]:
        found: list[AnswerPiece] = []
        for piece in pieces:
            if self._inner is None or isinstance(piece, ThoughtPiece):
                found.append(piece)
            else:
                found += self._inner.push(-1, piece.text)
        return found


def answer_reader(
    format: ThoughtFormat | None, start: Start, calls: ToolCallReader | None
) -> AnswerReader | None:
    """What reads an answer; None where it can only be words."""
    if format is not None and format.channels:
        return ChannelReader(format, start, calls_count=calls is not None)
    if format is not None:
        return _Tagged(TagReader(format, start), calls)
    return calls


def told_apart(reader: AnswerReader, written: Iterable[tuple[int, str]]) -> tuple[str, str]:
    """A text that is there already: the thought and the answer in it."""
    pieces = [piece for token, text in written for piece in reader.push(token, text)]
    pieces += reader.finish()
    thought = [piece.text for piece in pieces if isinstance(piece, ThoughtPiece)]
    answer = [piece.text for piece in pieces if isinstance(piece, TextPiece)]
    return "".join(thought), "".join(answer)
