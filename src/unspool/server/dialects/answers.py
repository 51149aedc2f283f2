"""Answers that several APIs share, as blocks of reasoning, text and tool calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from unspool.engine.generation import Generation
from unspool.engine.results import Candidate, Score, Step
from unspool.server.dialects.chat_prompt import ToolUse
from unspool.server.http.events import DONE, Wire, event
from unspool.server.http.replies import new_id
from unspool.server.runtime.schema import Extension, StreamOptions
from unspool.server.runtime.state import Call
from unspool.server.runtime.texts import (
    RequestTexts,
    progress_json,
    step_json,
    texts_json,
    timings_json,
)
from unspool.text.reasoning import OutputParser, OutputPiece, OutputStart, ReasoningPiece
from unspool.text.tokenizer.tokenizer import Tokenizer
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


MIN_LOGPROB = -9999.0  # OpenAI's value for impossible tokens: JSON has no infinity


def clamp_logprob(logprob: float) -> float:
    return max(MIN_LOGPROB, logprob)


def token_text(piece: bytes) -> str:
    """A token's bytes as text; as escaped bytes, like OpenAI's, if they are not UTF-8."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class LogprobFormat:
    """Formats log-probabilities of a model's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._size = tokenizer, len(tokenizer)

    def bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token) if token < self._size else b""

    def text(self, token: int) -> str:
        return token_text(self.bytes(token))

    def chat(self, steps: Sequence[Step], end_ids: frozenset[int], top: int) -> dict[str, Any]:
        content = [self._chat_token(step, top) for step in steps if step.token not in end_ids]
        return {"content": content, "refusal": None}

    def _chat_token(self, step: Step, top: int) -> dict[str, Any]:
        return {
            **self._token_json(step.token, step.logprob),
            "top_logprobs": [self._token_json(c.token, c.logprob) for c in step.candidates[:top]],
        }

    def _token_json(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.bytes(token)
        return {"token": token_text(piece), "logprob": clamp_logprob(logprob), "bytes": list(piece)}

    def completion(self, steps: Sequence[Step], top: int, offset: int) -> dict[str, Any]:
        """Of generated steps; `offset` characters precede them."""
        logprobs = _empty()
        for step in steps:
            self._add(logprobs, step.token, step.logprob, step.candidates[:top], offset)
            offset += len(step.text)
        return logprobs

    def echoed(self, score: Score, top: int) -> tuple[dict[str, Any], int]:
        """Of a prompt, and its number of characters."""
        logprobs, offset = _empty(), 0
        for position in score.positions:
            self._add(logprobs, position.token, position.logprob, position.candidates[:top], offset)
            offset += len(self.bytes(position.token).decode("utf-8", "replace"))
        return logprobs, offset

    def _add(
        self,
        logprobs: dict[str, Any],
        token: int,
        logprob: float | None,
        candidates: Sequence[Candidate],
        offset: int,
    ) -> None:
        text = self.text(token)
        logprobs["tokens"].append(text)
        logprobs["token_logprobs"].append(None if logprob is None else clamp_logprob(logprob))
        logprobs["text_offset"].append(offset)
        best = {self.text(c.token): clamp_logprob(c.logprob) for c in reversed(candidates)}
        if logprob is not None:
            best.setdefault(text, clamp_logprob(logprob))  # always has the token itself
        logprobs["top_logprobs"].append(None if logprob is None else best)


def _empty() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def join_logprobs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: first[name] + second[name] for name in first}


class Answer:
    """The envelope around an answer's choices."""

    kind: str  # `object` of a complete answer
    chunk_kind: str
    prefix: str  # of its id

    def __init__(
        self,
        call: Call,
        texts: RequestTexts,
        extension: Extension | None,
        stream_options: StreamOptions | None,
    ) -> None:
        self.call, self.texts, self.served = call, texts, call.served
        self.id, self.created = new_id(self.prefix), int(time.time())
        self.logprob_format = LogprobFormat(call.served.lm.tokenizer)
        self.has_extension = extension is not None
        self.trace = extension is not None and extension.trace
        self.wants_usage = stream_options is not None and stream_options.include_usage
        self.verbose = False  # a complete answer has the prompt as text
        self.timed = False  # every chunk has timings, not only the last of a choice

    def _complete_json(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        answer = {**self._envelope(self.kind, choices), "usage": self.texts.usage()}
        if 0 in self.texts.texts:
            answer["timings"] = timings_json(self.texts.texts[0])
        if self.verbose:
            decode = self.served.lm.tokenizer.decode
            answer["__verbose"] = {"prompt": decode(self.texts.prompts[0])}
        if self.has_extension:
            answer["unspool"] = self._extension_json(self.trace)
        return answer

    def _chunk(self, choice: dict[str, Any], step: Step | None = None) -> bytes:
        """The next piece of one choice; with `step`, its full record under `unspool`."""
        chunk = self._envelope(self.chunk_kind, [choice])
        if self.wants_usage:  # null in every chunk but the last
            chunk["usage"] = None
        has_role = "role" in choice.get("delta", ())
        if (self.timed and not has_role) or choice["finish_reason"]:
            text = self.texts.texts.get(choice["index"])
            if text is not None:
                chunk["timings"] = timings_json(text)
        if step is not None:
            prompt = self.texts.prompts[choice["index"] // self.texts.n]
            chunk["unspool"] = step_json(step, len(prompt), self.served.lm.readable)
        return event(chunk)

    def _watch_progress(self, wire: Wire) -> None:
        """Send chunks without choices that report the progress of the prompt."""

        def report(number: int, computed: int) -> None:
            progress = progress_json(self.texts.texts[number], computed, timed=self.timed)
            wire.write(event({**self._envelope(self.chunk_kind, []), **progress}))

        self.texts.watch_progress(report)

    def _last_events(self) -> bytes:
        last = self._envelope(self.chunk_kind, [])
        if self.wants_usage:
            last["usage"] = self.texts.usage()
            if 0 in self.texts.texts:
                last["timings"] = timings_json(self.texts.texts[0])
        if self.has_extension:
            last["unspool"] = self._extension_json(False)
        return (event(last) if self.wants_usage or self.has_extension else b"") + DONE

    def _extension_json(self, trace: bool) -> dict[str, Any]:
        """The value of `unspool`."""
        return texts_json(self.texts, trace)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.served.name,
            "system_fingerprint": self.served.fingerprint,
            "choices": choices,
        }


class BlockAnswer:
    """An answer of one text, as a list of blocks: reasoning, text and tool calls."""

    def __init__(
        self, call: Call, texts: RequestTexts, use: ToolUse, *, never_empty: bool = False
    ) -> None:
        self.texts, self.served = texts, call.served
        self.blocks = BlockParser(
            lambda start: use.reader(call.served, start),
            one_call=use.parallel is False,
            never_empty=never_empty,
        )

    @property
    def generation(self) -> Generation:
        return self.texts.all[0].generation

    async def read(self) -> list[Block]:
        """All blocks, once the text has ended."""
        await self.texts.finish()
        return self.blocks.read(self.generation)

    async def deliver(self, render: Callable[[list[Change]], bytes], wire: Wire) -> None:
        """Render the changes of new steps, and send them."""

        def send(steps: list[tuple[int, Step]]) -> None:
            wire.write(render([change for _, step in steps for change in self.blocks.push(step)]))

        await self.texts.deliver_final(send, wire)
