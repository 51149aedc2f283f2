"""An answer as a row of blocks, each of thoughts, of words or of one call, as it is being written.

    blocks = BlockParser(lambda start: use.reader(served, start))
    for step in steps:
        for change in blocks.take(step):
            ...                                   # Opened, Grown, Closed
    blocks.all

What `/v1/responses` calls items and `/v1/messages` content blocks. Whole answers are made by the
same steps as streams, so that both are always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from unspool.engine.generation import Generation
from unspool.engine.steps import Step
from unspool.serve.core.state import new_id
from unspool.text.thoughts.formats import Start
from unspool.text.thoughts.pieces import AnswerPiece, ThoughtPiece
from unspool.text.thoughts.reader import AnswerReader
from unspool.text.tools.calls import CallArguments, CallBegun, CallEnded, TextPiece

# Makes a reader for an answer that begins as its prompt says, or, if given, elsewhere.
MakeReader = Callable[[Start | None], AnswerReader | None]

_CUT = ("length", "context", "interrupted")  # reasons to stop before the model was done


def was_cut(reason: str) -> bool:
    """Whether a text ended for want of room, not because it was finished."""
    return reason in _CUT


@dataclass(eq=False, slots=True)
class Block:
    """Words, a thought, or a call."""

    index: int
    name: str | None  # of the function; None: words or a thought
    is_thought: bool = False
    id: str = field(default_factory=lambda: new_id(""))
    parts: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)  # that wrote the words or the thought
    is_complete: bool = False

    @property
    def is_words(self) -> bool:
        return self.name is None and not self.is_thought

    @property
    def text(self) -> str:
        """The words, or the call's arguments in JSON."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Opened:
    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    block: Block
    text: str
    steps: list[Step]  # those of it that were not told yet


@dataclass(frozen=True, slots=True)
class Closed:
    block: Block


Change = Opened | Grown | Closed


class BlockParser:
    """Takes steps, and tells what they change."""

    def __init__(
        self, reader: MakeReader, *, one_call: bool = False, never_empty: bool = False
    ) -> None:
        self._make_reader = reader
        self._one_call, self._never_empty = one_call, never_empty
        self._begin(None)

    def _begin(self, start: Start | None) -> None:
        self._reader = self._make_reader(start)
        self.all: list[Block] = []
        self._open: Block | None = None
        self._unsent: list[Step] = []
        self._is_over = False  # the one call that is allowed has been made

    @property
    def has_calls(self) -> bool:
        return any(block.name is not None for block in self.all)

    def read(self, generation: Generation) -> list[Block]:
        """A text that is finished."""
        self._read_all(generation)
        if self._reader is not None and self._reader.is_stray:  # it began inside of a thought
            self._begin(Start("inside"))
            self._read_all(generation)
        return self.all

    def _read_all(self, generation: Generation) -> None:
        for step in generation.steps:
            for _ in self.take(step):
                pass
        for _ in self.end(generation.finish_reason):
            pass

    def take(self, step: Step) -> Iterator[Change]:
        """What one more step changes."""
        self._unsent.append(step)
        for piece in self._pieces(step):
            if not self._is_over:
                yield from self._take_piece(piece)
        if step.finish_reason:
            yield from self.end(step.finish_reason)

    def end(self, reason: str) -> Iterator[Change]:
        """The text is over; `take` says so itself, but for a text that has not a single step."""
        if self._never_empty and not any(not block.is_thought for block in self.all):
            yield from self._close(not was_cut(reason))
            yield self._open_block(None)
        if self._open is not None:
            self._open.steps += self._unsent
            yield from self._close(not was_cut(reason))

    def _pieces(self, step: Step) -> Sequence[AnswerPiece]:
        if self._reader is None:
            return [TextPiece(step.text)] if step.text else []
        found = self._reader.push(step.token, step.text)
        return [*found, *self._reader.finish()] if step.finish_reason else found

    def _take_piece(self, piece: AnswerPiece) -> Iterator[Change]:
        if isinstance(piece, TextPiece | ThoughtPiece):
            is_thought = isinstance(piece, ThoughtPiece)
            if self._open is not None and self._open.is_thought != is_thought:
                yield from self._close(True)
            if self._open is None:
                yield self._open_block(None, is_thought)
            # What marks the thought's end wrote no words.
            steps = [step for step in self._unsent if is_thought or not step.thought]
            yield self._grow(piece.text, steps)
            self._unsent = []
        elif isinstance(piece, CallBegun):
            yield from self._close(True)
            yield self._open_block(piece.name)
        elif isinstance(piece, CallArguments):
            yield self._grow(piece.text, [])
        else:
            assert isinstance(piece, CallEnded) and self._reader is not None
            self._is_over = self._one_call
            yield from self._close(self._reader.calls[piece.index].is_complete)
            self._unsent = []  # what wrote a call wrote no words

    def _open_block(self, name: str | None, is_thought: bool = False) -> Opened:
        self._open = Block(len(self.all), name, is_thought)
        self.all.append(self._open)
        return Opened(self._open)

    def _grow(self, text: str, steps: list[Step]) -> Grown:
        assert self._open is not None
        self._open.parts.append(text)
        self._open.steps += steps
        return Grown(self._open, text, steps)

    def _close(self, is_complete: bool) -> Iterator[Change]:
        if self._open is not None:
            closed, self._open = self._open, None
            closed.is_complete = is_complete
            yield Closed(closed)
