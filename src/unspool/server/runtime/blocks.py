"""Split an answer into blocks while it is generated: reasoning, text and tool calls.

    blocks = BlockParser(lambda start: use.reader(served, start))
    for step in steps:
        for change in blocks.push(step):
            ...                                   # BlockOpened, BlockGrown, BlockClosed
    blocks.all

Blocks are the items of `/v1/responses` and the content blocks of `/v1/messages`. Complete answers
and streams are parsed from the same steps, so that both are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from unspool.engine.generation import Generation
from unspool.engine.results import Step
from unspool.server.http.replies import new_id
from unspool.text.reasoning import OutputParser, OutputPiece, OutputStart, ReasoningPiece
from unspool.text.tools.parser import TextPiece, ToolCallArguments, ToolCallEnd, ToolCallStart

# Makes a reader for an answer; the start overrides that of the prompt (e.g. inside a thought).
MakeReader = Callable[[OutputStart | None], OutputParser | None]

_CUT_REASONS = ("length", "context", "interrupted")


def was_cut(reason: str) -> bool:
    """Whether a text was cut off before the model finished it."""
    return reason in _CUT_REASONS


@dataclass(eq=False, slots=True)
class Block:
    """A block of text, of reasoning, or one tool call."""

    index: int
    name: str | None  # of the function; None: text or reasoning
    is_thought: bool = False
    id: str = field(default_factory=lambda: new_id(""))
    parts: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)  # that wrote the text or the reasoning
    is_complete: bool = False

    @property
    def is_text(self) -> bool:
        return self.name is None and not self.is_thought

    @property
    def text(self) -> str:
        """The text, or the arguments of the call as JSON."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class BlockOpened:
    block: Block


@dataclass(frozen=True, slots=True)
class BlockGrown:
    block: Block
    text: str
    steps: list[Step]  # new in this change


@dataclass(frozen=True, slots=True)
class BlockClosed:
    block: Block


Change = BlockOpened | BlockGrown | BlockClosed


class BlockParser:
    """Takes steps, and yields the changes they make to the blocks."""

    def __init__(
        self, reader: MakeReader, *, one_call: bool = False, never_empty: bool = False
    ) -> None:
        self._make_reader = reader
        self._one_call, self._never_empty = one_call, never_empty
        self._begin(None)

    def _begin(self, start: OutputStart | None) -> None:
        self._reader = self._make_reader(start)
        self.all: list[Block] = []
        self._open: Block | None = None
        self._unsent: list[Step] = []
        self._is_over = False  # with `one_call`: the call is complete

    @property
    def has_calls(self) -> bool:
        return any(block.name is not None for block in self.all)

    def read(self, generation: Generation) -> list[Block]:
        """Parse a finished text."""
        self._read_all(generation)
        if (
            self._reader is not None and self._reader.has_stray_close
        ):  # it started inside of a thought
            self._begin(OutputStart("inside"))
            self._read_all(generation)
        return self.all

    def _read_all(self, generation: Generation) -> None:
        for step in generation.steps:
            for _ in self.push(step):
                pass
        for _ in self.end(generation.finish_reason):
            pass

    def push(self, step: Step) -> Iterator[Change]:
        """Yield the changes of one more step."""
        self._unsent.append(step)
        for piece in self._pieces(step):
            if not self._is_over:
                yield from self._push_piece(piece)
        if step.finish_reason:
            yield from self.end(step.finish_reason)

    def end(self, reason: str) -> Iterator[Change]:
        """End the text. `push` does this at the last step; a text without steps needs this call."""
        if self._never_empty and not any(not block.is_thought for block in self.all):
            yield from self._close(not was_cut(reason))
            yield self._open_block(None)
        if self._open is not None:
            self._open.steps += self._unsent
            yield from self._close(not was_cut(reason))

    def _pieces(self, step: Step) -> Sequence[OutputPiece]:
        if self._reader is None:
            return [TextPiece(step.text)] if step.text else []
        pieces = self._reader.push(step.token, step.text)
        return [*pieces, *self._reader.finish()] if step.finish_reason else pieces

    def _push_piece(self, piece: OutputPiece) -> Iterator[Change]:
        if isinstance(piece, TextPiece | ReasoningPiece):
            is_thought = isinstance(piece, ReasoningPiece)
            if self._open is not None and self._open.is_thought != is_thought:
                yield from self._close(True)
            if self._open is None:
                yield self._open_block(None, is_thought)
            # The marker that ends a thought belongs to no text.
            steps = [step for step in self._unsent if is_thought or not step.thought]
            yield self._grow(piece.text, steps)
            self._unsent = []
        elif isinstance(piece, ToolCallStart):
            yield from self._close(True)
            yield self._open_block(piece.name)
        elif isinstance(piece, ToolCallArguments):
            yield self._grow(piece.text, [])
        else:
            assert isinstance(piece, ToolCallEnd) and self._reader is not None
            self._is_over = self._one_call
            yield from self._close(self._reader.calls[piece.index].is_complete)
            self._unsent = []  # steps of a call belong to no text

    def _open_block(self, name: str | None, is_thought: bool = False) -> BlockOpened:
        self._open = Block(len(self.all), name, is_thought)
        self.all.append(self._open)
        return BlockOpened(self._open)

    def _grow(self, text: str, steps: list[Step]) -> BlockGrown:
        assert self._open is not None
        self._open.parts.append(text)
        self._open.steps += steps
        return BlockGrown(self._open, text, steps)

    def _close(self, is_complete: bool) -> Iterator[Change]:
        if self._open is not None:
            closed, self._open = self._open, None
            closed.is_complete = is_complete
            yield BlockClosed(closed)
