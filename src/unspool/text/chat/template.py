"""Chat templates: messages to token ids, by the checkpoint's template.

    chat = ChatTemplate(tokenizer.chat_template, tokenizer)
    prompt = chat.encode([{"role": "user", "content": "Why do leaves change color in fall?"}])
    prompt.ids, prompt.text, prompt.spans

Text and ids are those of transformers with the same template, with one difference: a control token
written in a message, a tool or any other string of the caller is encoded as text. Only the template
writes control tokens. As in transformers, no start token is added: templates write it themselves.

A model without a template gets plain lines, one per message, after the start token if it uses one:

    System: You are a poet.
    User: Why do leaves change color in fall?
    Assistant:
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from unspool.errors import SettingsError, UnspoolError, count
from unspool.text.chat.messages import (
    Message,
    equivalent_turns,
    join_text_parts,
    plain_json,
    validate_messages,
)
from unspool.text.chat.sandbox import (
    GENERATION_EDGE,
    TEMPLATE,
    UNKNOWN,
    MessagesRefusedError,
    OriginText,
    SandboxedTemplate,
    is_template,
    origin_mark,
    origin_of,
    with_origin,
)

# -- The token spans of messages in a rendered conversation


@dataclass(frozen=True)
class Span:
    """The tokens `ids[start:end]` of one message, with the template's text around it."""

    role: str
    start: int
    end: int


@dataclass(frozen=True)
class EncodedPart:
    """A part of the text and its ids; parts follow each other without gaps."""

    text: str
    ids: list[int]


def message_starts(origin: str, count: int) -> list[int]:
    """Return where each of `count` messages begins in a text with these origins."""
    runs = [(ord(run[1]), *run.span()) for run in re.finditer(r"(?s)(.)\1*", origin)]
    begins = [begin for _, begin, _ in runs]
    words: dict[int, list[tuple[int, int]]] = {}  # by message: spans of its text
    for mark, begin, end in runs:
        if not mark & 1:
            words.setdefault(mark >> 1, []).append((begin, end))
    starts = [0]
    for number in range(2, count + 1):
        first = words[number][0][0] if number in words else len(origin)
        before = [end for begin, end in words.get(number - 1, ()) if begin < first]
        start = max([starts[-1], *before])
        later = range(bisect_left(begins, start), len(runs))
        starts.append(next((begins[i] for i in later if runs[i][0] >> 1 >= number), len(origin)))
    return starts


def token_spans(
    parts: Sequence[EncodedPart], starts: Sequence[int], token_bytes: Callable[[int], bytes]
) -> list[tuple[int, int]]:
    """Convert starts in the text to spans in the ids: (start, end) of each, without gaps."""
    edges, chars, tokens = [0], 0, 0
    for part in parts:
        end = chars + len(part.text)
        while len(edges) < len(starts) and starts[len(edges)] < end:
            position = max(0, starts[len(edges)] - chars)
            edges.append(tokens + _token_at(part, position, token_bytes))
        chars, tokens = end, tokens + len(part.ids)
    edges += [tokens] * (len(starts) + 1 - len(edges))
    return [(a, max(a, b)) for a, b in pairwise(edges)]


def _token_at(part: EncodedPart, position: int, token_bytes: Callable[[int], bytes]) -> int:
    """Return the index of the first token that begins at or after this position of the text."""
    if position == 0:
        return 0
    # Count from the end, because an encoder may put a space before the text.
    remaining_bytes = len(part.text[position:].encode("utf-8", "replace"))
    index = len(part.ids)
    while (
        index and (remaining_bytes := remaining_bytes - len(token_bytes(part.ids[index - 1]))) >= 0
    ):
        index -= 1
    return index


def tokens_within(
    parts: Sequence[EncodedPart], begin: int, end: int, token_bytes: Callable[[int], bytes]
) -> tuple[int, int]:
    """Return the span of the tokens that contain characters from `begin` to `end`."""
    if begin >= end:
        return 0, 0
    first = last = chars = tokens = 0
    for part in parts:
        part_end = chars + len(part.text)
        if chars <= begin < part_end:
            first = tokens + _edge(part, begin - chars, token_bytes, before=True)
        if chars < end <= part_end:
            last = tokens + _edge(part, end - chars, token_bytes, before=False)
        chars, tokens = part_end, tokens + len(part.ids)
    return first, last


def _edge(
    part: EncodedPart, position: int, token_bytes: Callable[[int], bytes], *, before: bool
) -> int:
    """Return the index of the token that begins at this position of the text.

    If none does, return the one before or after it. Counts from the end, because an encoder may
    put a space before the text.
    """
    remaining_bytes = len(part.text[position:].encode("utf-8", "replace"))
    index, length = len(part.ids), 0
    while index:
        extended = length + len(token_bytes(part.ids[index - 1]))
        if length >= remaining_bytes if before else extended > remaining_bytes:
            break
        index, length = index - 1, extended
    return index


Result = TypeVar("Result")

PLAIN_TEMPLATE = """\
{%- if start_token %}{{ start_token }}{% endif %}
{%- for message in messages -%}
{{ message.role | capitalize }}: {% if message.content is string %}{{ message.content | trim }}
{%- endif %}{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}Assistant:{% endif %}"""

# A base model continues with the user's turn: stop it there.
PLAIN_STOPS = ("\nUser:", "\nSystem:", "\nTool:")


class TokenizerLike(Protocol):
    """The part of a tokenizer that chat templates use."""

    special_tokens: Mapping[str, int]
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    chat_template: str | None

    def encode(self, text: str, *, specials: bool = False, bos: bool = False) -> list[int]: ...
    def token_text(self, token: int) -> str: ...
    def token_bytes(self, token: int) -> bytes: ...


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as token ids."""

    ids: list[int]  # the token ids
    spans: tuple[Span, ...]  # one per message, in order, without gaps
    generation: Span | None  # the generation prompt, after the last message
    text: str  # the formatted conversation

    def __repr__(self) -> str:
        return (
            f"<ChatPrompt of {count(len(self.spans), 'message')}, {count(len(self.ids), 'token')}>"
        )


# Templates build control tokens from these roles: '<|' + message.role + '|>'.
_KNOWN_ROLES = {"system", "user", "assistant", "tool", "developer", "function", "ipython", "model",
                "environment"}  # fmt: skip

# Origin marks of a continued message's text, and of the placeholder for empty text.
_OPEN, _BLANK = "\U0010fffe", "\U0010fffc"


class ChatTemplate:
    """A chat template and its tokenizer."""

    def __init__(self, source: str | None, tokenizer: TokenizerLike) -> None:
        self.is_plain = source is None  # the model has no template: a generic one is used
        self._template = SandboxedTemplate(PLAIN_TEMPLATE if source is None else source)
        self.tokenizer = tokenizer  # encodes the formatted text

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings that a chat in this format needs, in addition to the end tokens."""
        return PLAIN_STOPS if self.is_plain else ()

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the text of a conversation.

        `add_generation_prompt` (the default) ends it with the generation prompt;
        `continue_final_message` ends it after the last message's content instead, so that the
        model continues that message. `tools` are function descriptions. Other options are passed
        to the template: `documents`, `enable_thinking` and others. If the template refuses the
        messages, equivalent turns are tried.
        """
        return self.try_turns(self.render_as_is, messages, options)

    def encode(self, messages: Sequence[Message], **options: Any) -> ChatPrompt:
        """Return the ids and message spans of a conversation; options as in `render`."""
        return self.try_turns(self._encode_prompt, messages, options)

    def try_turns(
        self, make: Callable[..., Result], messages: Sequence[Message], options: Mapping[str, Any]
    ) -> Result:
        """Return `make(messages)`; if the template refuses the messages, try equivalent turns."""
        try:
            return make(messages, **options)
        except MessagesRefusedError:
            for turns in equivalent_turns(messages):
                with suppress(MessagesRefusedError):
                    return make(turns, **options)
            raise

    def render_as_is(self, messages: Sequence[Message], **options: Any) -> str:
        """Render without trying equivalent turns."""
        return str.__str__(self._render(self._variables(messages, **options)))

    def render_marked(self, messages: Sequence[Message], **options: Any) -> OriginText:
        """Render with the origin of each character, and with marks at generation blocks."""
        return self._template.render(self._variables(messages, **options), mark_generation=True)

    @cached_property
    def generation_prompt(self) -> str:
        """The text with which the template starts the assistant's turn."""
        probe = [{"role": "user", "content": "probe"}]
        try:
            with_prompt = self.render_as_is(probe, add_generation_prompt=True)
            plain = self.render_as_is(probe, add_generation_prompt=False)
        except UnspoolError:  # the template requires other messages
            return ""
        return with_prompt[len(plain) :] if with_prompt.startswith(plain) else ""

    @property
    def marks_generation(self) -> bool:
        """Whether the template has generation tags."""
        return self._template.marks_generation

    def _encode_prompt(self, messages: Sequence[Message], **options: Any) -> ChatPrompt:
        variables, now = self._variables(messages, **options), datetime.now()
        text = self._render(variables, now)
        parts = self.encode_parts(text)
        starts = message_starts(origin_of(text), len(messages))
        has_prompt = variables["add_generation_prompt"]
        if has_prompt:
            end = self._end_of_messages(text, variables, now)
            starts = [*(min(start, end) for start in starts), end]
        roles = [str.__str__(message["role"]) for message in variables["messages"]]
        spans = [
            Span(role, start, end)
            for role, (start, end) in zip(
                [*roles, *["assistant"] * has_prompt],
                token_spans(parts, starts, self.tokenizer.token_bytes),
                strict=True,
            )
        ]
        return ChatPrompt(
            ids=[token for part in parts for token in part.ids],
            generation=spans.pop() if has_prompt else None,
            spans=tuple(spans),
            text=str.__str__(text),
        )

    def encode_after(
        self, messages: Sequence[Message], index: int, **options: Any
    ) -> list[int] | None:
        """Return the ids of the text that follows the content of message `index`.

        They extend a conversation that is stored as ids, so that the model's tokens are not
        encoded again. None if the template changes that message when others follow it.
        """
        text = self._render(self._variables(messages, **options))
        prefix = self.render(messages[: index + 1], continue_final_message=True, **options)
        return self._encode_from(text, len(prefix)) if text.startswith(prefix) else None

    def encode_suffix(self, messages: Sequence[Message], index: int) -> list[int] | None:
        """As `encode_after`, even if the template changes the message; None if it is omitted."""
        text = self._render(self._variables(messages))
        end = origin_of(text).rfind(origin_mark(index + 1, template=False)) + 1
        return self._encode_from(text, end) if end else None

    def _encode_from(self, text: OriginText, skip: int) -> list[int]:
        """Return the ids of a text without its first `left` characters."""
        ids: list[int] = []
        for part in self.encode_parts(text):
            if skip <= 0:
                ids += part.ids
            elif skip < len(part.text):
                ids += self.encode_inside(part.text[skip:], at_start=False)
            skip -= len(part.text)
        return ids

    # Rendering.

    def _variables(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> dict[str, Any]:
        """Return the template's variables, with an origin for each string."""
        if continue_final_message and add_generation_prompt:
            raise SettingsError(
                "continue_final_message continues the last message and add_generation_prompt begins"
                " a new one: give only one of them"
            )
        checked = validate_messages(messages)
        if not self._reads_parts:
            checked = [join_text_parts(message) for message in checked]
        marked = []
        for number, message in enumerate(checked, start=1):
            is_known = message["role"] in _KNOWN_ROLES
            fields = with_origin(message, origin_mark(number, template=False))
            marked.append(
                {
                    **fields,
                    "role": OriginText(message["role"], origin_mark(number, template=is_known)),
                }
            )
        if continue_final_message:
            _mark_open(marked[-1])
        options = plain_json(dict(extra), "template options")
        return {
            **self._token_names,
            "documents": None,
            **{name: with_origin(value, TEMPLATE if name.endswith("_token") else UNKNOWN)
               for name, value in options.items()},
            "messages": marked,
            "tools": with_origin(plain_json(tools, "tools"), UNKNOWN),
            "add_generation_prompt": not continue_final_message
            if add_generation_prompt is None
            else bool(add_generation_prompt),
        }  # fmt: skip

    def _render(self, variables: dict[str, Any], now: datetime | None = None) -> OriginText:
        text = self._template.render(variables, now=now)
        number = len(variables["messages"])
        mark = _open_mark(variables["messages"][-1])
        if mark is None:
            return text
        end = origin_of(text).rfind(mark)
        if end < 0:
            raise UnspoolError(
                "the chat template omits the last message, so it cannot be continued: end"
                " with an assistant message"
            )
        text = text[: end + (mark == _OPEN)]
        return OriginText(text, origin_of(text).replace(_OPEN, origin_mark(number, template=False)))

    def _end_of_messages(self, text: OriginText, variables: dict[str, Any], now: datetime) -> int:
        """Return where the generation prompt begins."""
        try:
            messages = self._render({**variables, "add_generation_prompt": False}, now)
        except UnspoolError:  # some templates require the generation prompt
            messages = OriginText("")
        if messages and text.startswith(messages):
            return len(messages)
        return len(origin_of(text).rstrip(UNKNOWN + TEMPLATE))

    @cached_property
    def _token_names(self) -> dict[str, OriginText]:
        """`bos_token` and the like, those that the model has."""
        names = {}
        for name in ("bos", "eos", "unk", "pad"):
            token = getattr(self.tokenizer, f"{name}_id", None)
            if token is not None:
                names[f"{name}_token"] = OriginText(self.tokenizer.token_text(token), TEMPLATE)
        if self.tokenizer.add_bos and "bos_token" in names:
            names["start_token"] = names["bos_token"]  # for PLAIN_TEMPLATE
        return names

    @cached_property
    def _controls(self) -> dict[str, int]:
        """Tokens that only the template may write.

        The tokenizer's special tokens, and others such as `<tool_call>` that are in the template's
        literals and are one token.
        """
        controls = {
            text: token for text, token in self.tokenizer.special_tokens.items() if text.strip()
        }
        for text in set(
            re.findall(r"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,60}\]", self._template.literals)
        ):
            if text not in controls:
                ids = self.tokenizer.encode(text, specials=True)
                if len(ids) == 1 and self.tokenizer.token_text(ids[0]) == text:
                    controls[text] = ids[0]
        return controls

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template itself handles content that is a list of parts."""
        probe = [{"role": "user", "content": [{"type": "text", "text": "probe"}]}]
        variables = {**self._token_names, "messages": probe, "add_generation_prompt": True}
        try:
            text = self._template.render(variables)
        except UnspoolError:
            return False
        return "probe" in text and "'type'" not in text and '"type"' not in text

    # Encoding.

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._controls, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def _split_controls(self, text: OriginText) -> list[tuple[OriginText, bool]]:
        """Split the text into (piece, whether it is a control token written by the template)."""
        pieces: list[tuple[OriginText, bool]] = []
        end_pos = at = 0
        while match := self._control_pattern.search(text, at):
            start, end = match.span()
            at = start + 1
            if is_template(origin_of(text)[start:end]):
                pieces += [(text[end_pos:start], False), (text[start:end], True)]
                end_pos = at = end
        return [piece for piece in (*pieces, (text[end_pos:], False)) if piece[0]]

    def encode_parts(self, text: OriginText) -> list[EncodedPart]:
        """Encode the rendered text as parts with their ids.

        As much as possible is encoded together, because some vocabularies treat the start of a
        text differently. Only a piece in which the caller wrote a control token is encoded alone.
        """
        run: list[tuple[OriginText, bool]] = []
        parts: list[EncodedPart] = []
        for piece, is_control in self._split_controls(text):
            if is_control or not self._control_pattern.search(piece):
                run.append((piece, is_control))
                continue
            parts += self._encode_together(run, at_start=not parts)
            parts += self._encode_apart([(piece, False)], at_start=not parts)
            run = []
        return parts + self._encode_together(run, at_start=not parts)

    def _encode_together(
        self, run: list[tuple[OriginText, bool]], at_start: bool
    ) -> list[EncodedPart]:
        text = "".join(piece for piece, _ in run)
        ids = self.tokenizer.encode(text, specials=True)
        expected = [self._controls[piece] for piece, is_control in run if is_control]
        texts = {token: piece for piece, token in self._controls.items()}
        positions = [i for i, token in enumerate(ids) if token in texts and texts[token] in text]
        if [ids[position] for position in positions] != expected:
            return self._encode_apart(run, at_start)
        parts, start, remaining = [], 0, list(reversed(positions))
        for piece, is_control in run:
            end = start + 1 if is_control else (remaining[-1] if remaining else len(ids))
            parts.append(EncodedPart(piece, ids[start:end]))
            start = end
            if is_control:
                remaining.pop()
        return parts

    def _encode_apart(
        self, run: list[tuple[OriginText, bool]], at_start: bool
    ) -> list[EncodedPart]:
        parts: list[EncodedPart] = []
        for piece, is_control in run:
            ids = [self._controls[piece]] if is_control else None
            parts.append(
                EncodedPart(piece, ids or self._encode_text(piece, at_start and not parts))
            )
        return parts

    def _encode_text(self, text: str, at_start: bool) -> list[int]:
        """Encode the caller's text, without control tokens."""
        ids = self.encode_inside(text, at_start)
        written = [control for control in self._controls if len(control) > 1 and control in text]
        if all(self._controls[control] not in ids for control in written):
            return ids
        # The vocabulary has the control token as an ordinary piece too: split its text in two.
        ids, at = [], 0
        while match := self._control_pattern.search(text, at):
            ids += self.encode_inside(text[at : match.start() + 1], at_start and at == 0)
            at = match.start() + 1
        return ids + self.encode_inside(text[at:], at_start and at == 0)

    def encode_inside(self, text: str, at_start: bool) -> list[int]:
        """Encode a text that is at the start, or one that follows other text."""
        if at_start or not self._start_differs:
            return self.tokenizer.encode(text)
        # Encode after a line break, so that the text is not at a start, and remove the line break.
        lead = self.tokenizer.encode("\n")
        ids = self.tokenizer.encode("\n" + text)
        if ids[: len(lead)] == lead:
            return ids[len(lead) :]
        return self.tokenizer.encode(text)

    @cached_property
    def _start_differs(self) -> bool:
        """Whether text at the start is encoded differently from text after a control token."""
        encode = self.tokenizer.encode
        return any(
            encode(control + "a", specials=True)[1:] != encode("a")
            for control in list(self.tokenizer.special_tokens)[:1]
        )


def _last_text(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return where the last text of a message is, as a mapping and a key."""
    content = message.get("content")
    return (content[-1], "text") if isinstance(content, list) and content else (message, "content")


def _mark_open(message: dict[str, Any]) -> None:
    """Mark the message's content with the origin `_OPEN`.

    Empty content gets one character, so that its position can be located.
    """
    holder, key = _last_text(message)
    if not isinstance(holder.get(key), str):
        raise UnspoolError("the last message has no text to continue: give it content")
    blank = not holder[key].strip()
    holder[key] = OriginText(holder[key], _OPEN) + OriginText("." * blank, _BLANK)


def _open_mark(message: dict[str, Any]) -> str | None:
    holder, key = _last_text(message)
    mark = origin_of(holder.get(key) or "")[-1:]
    return mark if mark in (_OPEN, _BLANK) else None


# -- The loss mask of a conversation: which tokens the model is trained on


@dataclass(frozen=True)
class MaskedConversation:
    """A conversation as token ids with its loss mask."""

    ids: list[int]
    loss_mask: list[bool]
    text: str


def mask_conversation(
    chat: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    end_ids: Collection[int] = (),
) -> MaskedConversation:
    """Return the ids and loss mask of a conversation; a message with `weight: 0` is masked."""

    def lesson(turns: Sequence[Message]) -> MaskedConversation:
        unweighted = [{key: turn[key] for key in turn if key != "weight"} for turn in turns]
        marked = chat.render_marked(unweighted, tools=tools, add_generation_prompt=False)
        text, blocks = _remove_marks(marked)
        parts = chat.encode_parts(text)
        ids = [token for cut in parts for token in cut.ids]
        mask = [False] * len(ids)
        starts = [*message_starts(origin_of(text), len(turns)), len(text)]
        for turn, span in zip(turns, pairwise(starts), strict=True):
            if turn["role"] != "assistant" or turn.get("weight") == 0:
                continue
            for begin, end in _trained_spans(chat, text, span, blocks, parts, end_ids):
                mask[begin:end] = [True] * (end - begin)
        return MaskedConversation(ids, mask, str.__str__(text))

    return chat.try_turns(lesson, messages, {})


def _remove_marks(marked: OriginText) -> tuple[OriginText, list[tuple[int, int]]]:
    """Return the text without generation marks, and the spans between the marks."""
    origin = origin_of(marked)
    edges = [
        match.start()
        for match in re.finditer(GENERATION_EDGE, marked)
        if is_template(origin[match.start()])
    ]
    bounds = [-1, *edges, len(marked)]
    pieces = [(a + 1, b) for a, b in pairwise(bounds)]
    plain = str.__str__(marked)
    text = OriginText(
        "".join(plain[a:b] for a, b in pieces), "".join(origin[a:b] for a, b in pieces)
    )
    positions = [edge - number for number, edge in enumerate(edges)]
    return text, list(zip(positions[::2], positions[1::2], strict=True))


def _trained_spans(
    chat: ChatTemplate,
    text: OriginText,
    span: tuple[int, int],
    blocks: Sequence[tuple[int, int]],
    parts: Sequence[EncodedPart],
    end_ids: Collection[int],
) -> list[tuple[int, int]]:
    """Return the token spans of one assistant message to train on, as (begin, end)."""
    token_bytes = chat.tokenizer.token_bytes
    if chat.marks_generation:
        inside = [(begin, end) for begin, end in blocks if span[0] <= begin < span[1]]
        return [tokens_within(parts, begin, end, token_bytes) for begin, end in inside]
    begin, end = tokens_within(parts, _after_prompt(chat, text, *span), span[1], token_bytes)
    ids = [token for cut in parts for token in cut.ids]
    ends = [position for position in range(begin, end) if ids[position] in end_ids]
    return [(begin, ends[-1] + 1 if ends else end)]


def _after_prompt(chat: ChatTemplate, text: OriginText, begin: int, end: int) -> int:
    """Return where the model begins to write: after the generation prompt."""
    prompt = chat.generation_prompt
    prompt_pos = text.find(prompt.rstrip(), begin, end) if prompt.strip() else -1
    content_pos = next((n for n in range(begin, end) if not is_template(origin_of(text)[n])), end)
    if begin <= prompt_pos <= content_pos:
        begin = prompt_pos
    max_length, matching = min(end - begin, len(prompt)), 0
    while matching < max_length and text[begin + matching] == prompt[matching]:
        matching += 1
    return begin + matching
