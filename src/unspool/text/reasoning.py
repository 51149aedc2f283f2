"""Reasoning output: how a model marks it, and parsers that separate it from the answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from unspool.errors import UnspoolError
from unspool.text.tools.call_parsers import JsonCallParser
from unspool.text.tools.parser import (
    ParsedToolCall,
    Piece,
    TextPiece,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallParser,
    ToolCallStart,
    mark_overlap,
)

if TYPE_CHECKING:
    from unspool.text.chat.template import TokenizerLike

# -- Reasoning formats: how a model separates reasoning from its answer
#
#     format = thought_format(tokenizer.chat_template, tokenizer)     # None: no reasoning
#     start = format.start(prompt_ids, text)                          # where the answer begins
#     reader = answer_reader(format, start, calls)
#
# Most models write reasoning between two marks (`<think>` and `</think>`); gpt-oss writes messages
# in channels, one of which is for reasoning. The marks come from the chat template, or else from
# the vocabulary; never from the model's name. How reasoning is closed, up to the first word of the
# answer, is found by rendering an example.

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"

# Open mark, close mark, and text after the open mark that is not reasoning yet.
_MARKS = (
    ("<|channel>", "<channel|>", "thought\n"),
    ("<think>", "</think>", ""),
    ("[THINK]", "[/THINK]", ""),
    ("<thinking>", "</thinking>", ""),
    ("<seed:think>", "</seed:think>", ""),
    ("<|START_THINKING|>", "<|END_THINKING|>", ""),
)
# Template variables that switch reasoning on or off; "thinking" is also a key of messages.
_SWITCHES = {
    "enable_thinking": r"\benable_thinking\b",
    "thinking": r"\bif (not )?thinking\b|(?<![.\w'\"])thinking is (not )?defined",
}
_EFFORT = "reasoning_effort"
_TAIL = 32  # tokens at the end of a prompt that are searched for marks of several tokens


@dataclass(frozen=True)
class OutputStart:
    """Where an output begins: before reasoning, inside it, or after it, in the answer."""

    state: Literal["before", "inside", "behind"] = "before"
    header: str = ""  # part of a harmony header that is in the prompt


@dataclass(frozen=True)
class ReasoningFormat:
    """The reasoning marks of one model."""

    open: str
    close: str
    head: str = ""
    opening: str = ""  # begins reasoning: the open mark, with a line break if the template has one
    closing: str = ""  # ends reasoning and leads to the answer: "\n</think>\n\n"
    uses_channels: bool = False
    switch: str | None = None  # template variable that enables reasoning
    has_efforts: bool = False  # the template uses reasoning_effort
    ids: Mapping[str, int] = field(default_factory=dict)  # marks that are one token
    controls: Mapping[str, int] = field(default_factory=dict)  # ... that has no text
    opening_ids: tuple[int, ...] = ()
    close_ids: tuple[int, ...] = ()  # of `closing`, up to and with the close mark ...
    after_close_ids: tuple[int, ...] = ()  # ... and the tokens after it, up to the answer

    def template_options(
        self, think: bool | str | None, budget: int | None
    ) -> tuple[dict[str, Any], int | None]:
        """Return template variables and reasoning budget; `think` is a switch or an effort.

        Without reasoning the budget is 0, as not every template has a switch or every model obeys.
        """
        variables: dict[str, Any] = {}
        if think is None:
            return variables, budget
        is_on = think not in (False, "none")
        if self.has_efforts:
            efforts = {True: "medium", False: "low", "none": "low"}
            variables[_EFFORT] = efforts.get(think, think)
        if self.switch is not None:
            variables[self.switch] = is_on
        return variables, budget if is_on else 0

    def start(self, prompt: Sequence[int], text: str) -> OutputStart:
        """Return where the output after a prompt begins.

        `text` is the text of the prompt's last tokens (see `prompt_tail`), control tokens included.
        """
        if self.uses_channels:
            return self._start_in_channel(prompt, text)
        if self.open in self.ids and self.close in self.ids:
            marks = (self.ids[self.open], self.ids[self.close])
            last_mark = next(
                (at for at in reversed(range(len(prompt))) if prompt[at] in marks), None
            )
            if last_mark is None:
                return OutputStart()
            if prompt[last_mark] == marks[0]:
                return OutputStart("inside")
        open_pos, close_pos = text.rfind(self.open), text.rfind(self.close)
        if close_pos > open_pos and not text[close_pos + len(self.close) :].strip():
            return OutputStart("behind")
        if open_pos > close_pos and not text[open_pos + len(self.open) :].strip():
            return OutputStart("inside")
        return OutputStart()

    def _start_in_channel(self, prompt: Sequence[int], text: str) -> OutputStart:
        message, start = self.ids.get(MESSAGE), self.ids.get(START)
        message_start = next(
            (at for at in reversed(range(len(prompt))) if prompt[at] == start), None
        )
        if message_start is None or message not in prompt[message_start:]:
            return OutputStart(header=text.rpartition(START)[2] if START in text else "")
        is_thought = text.rpartition(CHANNEL)[2].startswith("analysis")
        return OutputStart("inside" if is_thought else "behind")


def prompt_tail(prompt: Sequence[int]) -> Sequence[int]:
    """Return the last tokens of a prompt, whose text `ReasoningFormat.start` needs."""
    return prompt[-_TAIL:]


def reasoning_format(template: str | None, tokenizer: TokenizerLike) -> ReasoningFormat | None:
    """Return the reasoning format of a chat template and vocabulary, None if there is none."""
    source = template or ""
    mark_ids = {mark: ids[0] for mark in _all_marks() if len(ids := _encoded(tokenizer, mark)) == 1}
    controls = {mark: token for mark, token in tokenizer.special_tokens.items() if mark in mark_ids}
    fields: dict[str, Any] = {
        "switch": next((name for name, use in _SWITCHES.items() if re.search(use, source)), None),
        "has_efforts": _EFFORT in source,
        "ids": mark_ids,
        "controls": controls,
    }
    if CHANNEL in source and MESSAGE in source:
        opening = f"{CHANNEL}analysis{MESSAGE}"
        closing = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"
        fmt = ReasoningFormat(
            CHANNEL, END, opening=opening, closing=closing, uses_channels=True, **fields
        )
        return _with_ids(fmt, tokenizer)
    marks = next((m for m in _MARKS if m[1] in source), None) or next(
        (m for m in _MARKS if m[0] in mark_ids and m[1] in mark_ids), None
    )
    if marks is None:
        return None
    opening, closing = _render_marks(template, tokenizer, *marks)
    return _with_ids(ReasoningFormat(*marks, opening=opening, closing=closing, **fields), tokenizer)


def _all_marks() -> list[str]:
    return [*(mark for marks in _MARKS for mark in marks[:2]), CHANNEL, MESSAGE, START, END]


def _encoded(tokenizer: TokenizerLike, text: str) -> list[int]:
    return tokenizer.encode(text, specials=True) if text else []


def _with_ids(fmt: ReasoningFormat, tokenizer: TokenizerLike) -> ReasoningFormat:
    end = fmt.closing.index(fmt.close) + len(fmt.close)
    return replace(
        fmt,
        opening_ids=tuple(_encoded(tokenizer, fmt.opening)),
        close_ids=tuple(_encoded(tokenizer, fmt.closing[:end])),
        after_close_ids=tuple(_encoded(tokenizer, fmt.closing[end:])),
    )


# Rendered to find out how a template writes reasoning and answer.
_THOUGHT, _ANSWER = "probe of thoughts", "probe of answers"
_TURNS = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT},
]


def _render_marks(
    template: str | None, tokenizer: TokenizerLike, open: str, close: str, head: str
) -> tuple[str, str]:
    """Return how reasoning begins and ends, by default marks if the template writes none."""
    default = (f"{open}{head}", close) if head else (f"{open}\n", f"{close}\n\n")
    if template is None:
        return default
    from unspool.text.chat.template import ChatTemplate  # imports Jinja

    try:
        text = ChatTemplate(template, tokenizer).render_as_is(_TURNS, add_generation_prompt=False)
    except UnspoolError:
        return default
    prefix, reasoning, suffix = str(text).partition(_THOUGHT)
    between, answer, _ = suffix.partition(_ANSWER)
    if not (reasoning and answer and open in prefix and close in between):
        return default
    return prefix[prefix.rindex(open) :], between


# -- Pieces of a parsed output: text, tool calls and reasoning


@dataclass(frozen=True)
class ReasoningPiece:
    """Reasoning text."""

    text: str


OutputPiece = Piece | ReasoningPiece


# -- Incremental parser for reasoning between two marks


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


# -- Incremental parser for OpenAI's harmony format: messages in channels

_FUNCTION = re.compile(r"to=functions\.([\w.:/-]{1,128}?)(?=$|[\s<])")
_RECIPIENT = re.compile(r"\bto=\S")


class HarmonyParser:
    """Parses one text. With `parse_calls`, a message to a function is a tool call, else text."""

    has_stray_close = False

    def __init__(self, format: ReasoningFormat, start: OutputStart, *, parse_calls: bool) -> None:
        self.calls: list[ParsedToolCall] = []
        self._marks = {token: mark for mark, token in format.ids.items()}
        self._parse_calls = parse_calls
        self._header: str | None = start.header if start.state == "before" else None
        self._kind = "thought" if start.state == "inside" else "words"
        self._name = ""  # function that the message calls
        self._call: JsonCallParser | None = None
        self._arguments: list[str] = []
        self._has_text = False  # of the current message
        self._previous_kinds: set[str] = set()

    @property
    def in_reasoning(self) -> bool:
        return self._header is None and self._kind == "thought"

    @property
    def next_is_reasoning(self) -> bool:
        """Whether the next token is not part of the answer: reasoning or a header."""
        return self._header is not None or self._kind == "thought"

    last_is_reasoning = next_is_reasoning  # the same for the last token

    def push(self, token: int, text: str) -> list[OutputPiece]:
        """Parse a token's id and the text that became certain with it."""
        mark = self._marks.get(token)
        if mark is not None and text.endswith(mark):  # in some vocabularies marks have a text
            text = text[: -len(mark)]
        pieces: list[OutputPiece] = self._read(text) if text else []
        if mark == MESSAGE:
            pieces += self._begin()
        elif mark in (START, END):
            pieces += self._end()
            self._header = ""
        elif mark == CHANNEL:
            if self._header is None:  # a header without <|start|>
                pieces += self._end()
            self._header = (self._header or "") + CHANNEL
        return pieces

    def end_turn(self) -> None:
        """Do nothing: the header of the next turn says what it is."""

    def finish(self) -> list[OutputPiece]:
        """End the text, and a tool call with it."""
        return self._end() if self._header is None else []

    def _begin(self) -> list[OutputPiece]:
        """Begin a message after its header."""
        header, self._header, self._has_text = self._header or "", None, False
        function = _FUNCTION.search(header)
        if function is not None and self._parse_calls:
            self._kind, self._name, self._arguments = "call", function[1], []
            self._call = JsonCallParser(self._name)
            return [ToolCallStart(len(self.calls), self._name)]
        channel = header.rpartition(CHANNEL)[2].strip()
        # A message to a built-in tool (to=python) is not part of the answer.
        is_reasoning = channel.startswith("analysis") or (
            _RECIPIENT.search(header) is not None and function is None
        )
        self._kind = "thought" if is_reasoning else "words"
        return []

    def _read(self, text: str) -> list[OutputPiece]:
        if self._header is not None:
            self._header += text
            return []
        if self._kind == "call":
            return self._read_call(text)
        if not self._has_text:
            text = text.lstrip()
            if not text:
                return []
            if self._kind in self._previous_kinds:  # two messages of a kind are two paragraphs
                text = f"\n\n{text}"
            self._has_text = True
            self._previous_kinds.add(self._kind)
        return [ReasoningPiece(text) if self._kind == "thought" else TextPiece(text)]

    def _read_call(self, text: str) -> list[OutputPiece]:
        call = self._call
        if call is None:
            return []  # after invalid JSON
        for character in text:
            if call.is_done or not call.push(character):
                self._call = call if call.is_done else None
                break
        fresh, call.fresh = "".join(call.fresh), []
        self._arguments.append(fresh)
        return [ToolCallArguments(len(self.calls), fresh)] if fresh else []

    def _end(self) -> list[OutputPiece]:
        """End the message."""
        if self._header is not None or self._kind != "call":
            return []
        is_complete = self._call is not None and self._call.is_done
        self.calls.append(ParsedToolCall(self._name, "".join(self._arguments), is_complete))
        self._kind = "words"
        return [ToolCallEnd(len(self.calls) - 1)]


# -- Parse an output as it arrives into reasoning, text and tool calls


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
