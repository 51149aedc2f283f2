"""Messages to token ids, by the checkpoint's own chat template.

    chat = ChatTemplate(tokenizer.chat_template, tokenizer)
    prompt = chat.encode([{"role": "user", "content": "Why do leaves change color in fall?"}])
    prompt.ids, prompt.text, prompt.spans

The text is what transformers renders from the same template, and the ids are what it makes of that
text, with one difference: a control token spelled in a message, a tool or any other string of the
caller is text. Only the template writes control tokens (see `origin.py` for how they are told
apart). As in transformers no start token is put before the text: a template that wants one
writes it.

A model without a template gets plain lines, one per message, and the start token if it wants one:

    System: You are a poet.
    User: Why do leaves change color in fall?
    Assistant:
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Protocol, TypeVar

from unspool.errors import SettingsError, UnspoolError, count
from unspool.text.chat.messages import Message, checked_messages, joined_parts, plain_json
from unspool.text.chat.origin import (
    TEMPLATE,
    UNKNOWN,
    Text,
    is_template,
    origin_mark,
    origin_of,
    with_origin,
)
from unspool.text.chat.sandbox import MessagesRefusedError, SandboxedTemplate
from unspool.text.chat.spans import Cut, Span, message_starts, token_spans
from unspool.text.chat.turns import other_ways

Result = TypeVar("Result")

PLAIN_TEMPLATE = """\
{%- if start_token %}{{ start_token }}{% endif %}
{%- for message in messages -%}
{{ message.role | capitalize }}: {% if message.content is string %}{{ message.content | trim }}
{%- endif %}{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}Assistant:{% endif %}"""

# A model that knows nothing of turns goes on to write the other side too: stop it there.
PLAIN_STOPS = ("\nUser:", "\nSystem:", "\nTool:")


class TokenizerLike(Protocol):
    """What a chat template needs of a tokenizer."""

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

    ids: list[int]
    spans: tuple[Span, ...]  # one per message, in order, without gaps
    generation: Span | None  # what asks the model for its turn, behind the last message
    text: str

    def __repr__(self) -> str:
        return (
            f"<ChatPrompt of {count(len(self.spans), 'message')}, {count(len(self.ids), 'token')}>"
        )


# Templates build control tokens from these on purpose: '<|' + message.role + '|>'.
_USUAL_ROLES = {"system", "user", "assistant", "tool", "developer", "function", "ipython", "model",
                "environment"}  # fmt: skip

# The origins of the words that a continued message ends with, and of what stands for none.
_OPEN, _BLANK = "\U0010fffe", "\U0010fffc"


class ChatTemplate:
    """One chat template and the tokenizer that it writes for."""

    def __init__(self, source: str | None, tokenizer: TokenizerLike) -> None:
        self.is_plain = source is None
        self._template = SandboxedTemplate(PLAIN_TEMPLATE if source is None else source)
        self.tokenizer = tokenizer

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings that a chat in this format needs, beside the model's end tokens."""
        return PLAIN_STOPS if self.is_plain else ()

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """The text of a conversation.

        `add_generation_prompt` (the default) ends it with what asks for the assistant's turn;
        `continue_final_message` ends it right behind the last message's content instead, so that
        the model goes on writing that message. `tools` are descriptions of functions. Other
        options go to the template: `documents`, `enable_thinking` and whatever else it knows.
        Messages that it refuses are put into other turns, if it takes them then (`turns.py`).
        """
        return self.in_turns(self.render_as_is, messages, options)

    def encode(self, messages: Sequence[Message], **options: Any) -> ChatPrompt:
        """The conversation as token ids, with the tokens of each message; options as in `render`"""
        return self.in_turns(self._prompt, messages, options)

    def in_turns(
        self,
        make: Callable[..., Result],
        messages: Sequence[Message],
        options: Mapping[str, Any],
    ) -> Result:
        """`make(messages)`; if the template refuses these messages, the same in other turns."""
        try:
            return make(messages, **options)
        except MessagesRefusedError:
            for turns in other_ways(messages):
                with suppress(MessagesRefusedError):
                    return make(turns, **options)
            raise

    def render_as_is(self, messages: Sequence[Message], **options: Any) -> str:
        """`render`, but for messages that the template takes in just these turns."""
        return str.__str__(self._render(self._variables(messages, **options)))

    def render_marked(self, messages: Sequence[Message], **options: Any) -> Text:
        """`render_as_is`, where each character knows where it came from; a mark stands before and
        behind what the template itself says that the model wrote."""
        return self._template.render(self._variables(messages, **options), mark_generation=True)

    @cached_property
    def generation_prompt(self) -> str:
        """What the template usually writes to ask for the assistant's turn."""
        probe = [{"role": "user", "content": "probe"}]
        try:
            asked = self.render_as_is(probe, add_generation_prompt=True)
            plain = self.render_as_is(probe, add_generation_prompt=False)
        except UnspoolError:  # a template that wants other messages
            return ""
        return asked[len(plain) :] if asked.startswith(plain) else ""

    @property
    def marks_generation(self) -> bool:
        """Whether the template says itself what the model wrote."""
        return self._template.marks_generation

    def _prompt(self, messages: Sequence[Message], **options: Any) -> ChatPrompt:
        variables, now = self._variables(messages, **options), datetime.now()
        text = self._render(variables, now)
        cuts = self.cuts(text)
        starts = message_starts(origin_of(text), len(messages))
        asks = variables["add_generation_prompt"]
        if asks:
            end = self._end_of_messages(text, variables, now)
            starts = [*(min(start, end) for start in starts), end]
        roles = [str.__str__(message["role"]) for message in variables["messages"]]
        spans = [
            Span(role, start, end)
            for role, (start, end) in zip(
                [*roles, *["assistant"] * asks],
                token_spans(cuts, starts, self.tokenizer.token_bytes),
                strict=True,
            )
        ]
        return ChatPrompt(
            ids=[token for cut in cuts for token in cut.ids],
            generation=spans.pop() if asks else None,
            spans=tuple(spans),
            text=str.__str__(text),
        )

    def encode_after(
        self, messages: Sequence[Message], index: int, **options: Any
    ) -> list[int] | None:
        """The ids of what the template writes behind the content of message `index`.

        A conversation that is kept as ids goes on with these, so that what the model wrote is not
        encoded again. None if the template changes that message once others follow it.
        """
        whole = self._render(self._variables(messages, **options))
        prefix = self.render(messages[: index + 1], continue_final_message=True, **options)
        return self._behind(whole, len(prefix)) if whole.startswith(prefix) else None

    def encode_behind(self, messages: Sequence[Message], index: int) -> list[int] | None:
        """`encode_after`, whatever the template does to that message; None: it leaves it out."""
        whole = self._render(self._variables(messages))
        end = origin_of(whole).rfind(origin_mark(index + 1, template=False)) + 1
        return self._behind(whole, end) if end else None

    def _behind(self, whole: Text, left: int) -> list[int]:
        """The ids of a text without its first `left` characters."""
        ids: list[int] = []
        for cut in self.cuts(whole):
            if left <= 0:
                ids += cut.ids
            elif left < len(cut.text):
                ids += self._encode_inside(cut.text[left:], at_start=False)
            left -= len(cut.text)
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
        """What the template gets; each string says where it came from."""
        if continue_final_message and add_generation_prompt:
            raise SettingsError(
                "continue_final_message goes on with the last message and add_generation_prompt"
                " begins a new one: give only one of them"
            )
        checked = checked_messages(messages)
        if not self._reads_parts:
            checked = [joined_parts(message) for message in checked]
        given = []
        for number, message in enumerate(checked, start=1):
            usual = message["role"] in _USUAL_ROLES
            words = with_origin(message, origin_mark(number, template=False))
            given.append(
                {**words, "role": Text(message["role"], origin_mark(number, template=usual))}
            )
        if continue_final_message:
            _leave_open(given[-1])
        options = plain_json(dict(extra), "template options")
        return {
            **self._token_names,
            "documents": None,
            **{name: with_origin(value, TEMPLATE if name.endswith("_token") else UNKNOWN)
               for name, value in options.items()},
            "messages": given,
            "tools": with_origin(plain_json(tools, "tools"), UNKNOWN),
            "add_generation_prompt": not continue_final_message
            if add_generation_prompt is None
            else bool(add_generation_prompt),
        }  # fmt: skip

    def _render(self, variables: dict[str, Any], now: datetime | None = None) -> Text:
        text = self._template.render(variables, now=now)
        number = len(variables["messages"])
        mark = _open_mark(variables["messages"][-1])
        if mark is None:
            return text
        end = origin_of(text).rfind(mark)
        if end < 0:
            raise UnspoolError(
                "the chat template leaves the last message out, so it cannot be continued: end"
                " with an assistant message"
            )
        text = text[: end + (mark == _OPEN)]
        return Text(text, origin_of(text).replace(_OPEN, origin_mark(number, template=False)))

    def _end_of_messages(self, text: Text, variables: dict[str, Any], now: datetime) -> int:
        """Where the generation prompt begins."""
        try:
            messages = self._render({**variables, "add_generation_prompt": False}, now)
        except UnspoolError:  # a template that insists on the generation prompt
            messages = Text("")
        if messages and text.startswith(messages):
            return len(messages)
        return len(origin_of(text).rstrip(UNKNOWN + TEMPLATE))

    @cached_property
    def _token_names(self) -> dict[str, Text]:
        """`bos_token` and its like, as far as the model has them."""
        names = {}
        for name in ("bos", "eos", "unk", "pad"):
            token = getattr(self.tokenizer, f"{name}_id", None)
            if token is not None:
                names[f"{name}_token"] = Text(self.tokenizer.token_text(token), TEMPLATE)
        if self.tokenizer.add_bos and "bos_token" in names:
            names["start_token"] = names["bos_token"]  # for the plain template
        return names

    @cached_property
    def _controls(self) -> dict[str, int]:
        """The tokens that only the template may write.

        Those that the tokenizer calls special; and those like `<tool_call>` that it does not call
        so, but that the template spells and that are one token.
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
        """Whether the template itself goes through content that is a list of parts."""
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

    def _pieces(self, text: Text) -> list[tuple[Text, bool]]:
        """The text cut into (piece, is a control token that the template wrote)."""
        pieces: list[tuple[Text, bool]] = []
        done = at = 0
        while found := self._control_pattern.search(text, at):
            start, end = found.span()
            at = start + 1
            if is_template(origin_of(text)[start:end]):
                pieces += [(text[done:start], False), (text[start:end], True)]
                done = at = end
        return [each for each in (*pieces, (text[done:], False)) if each[0]]

    def cuts(self, text: Text) -> list[Cut]:
        """The rendered text as runs of ids; each run also knows the text it stands for.

        As much as possible is encoded in one go, because some vocabularies treat the start of a
        text differently. Only a piece in which the caller spelled a control token goes alone.
        """
        together: list[tuple[Text, bool]] = []
        cuts: list[Cut] = []
        for piece, is_control in self._pieces(text):
            if is_control or not self._control_pattern.search(piece):
                together.append((piece, is_control))
                continue
            cuts += self._encode_together(together, at_start=not cuts)
            cuts += self._encode_apart([(piece, False)], at_start=not cuts)
            together = []
        return cuts + self._encode_together(together, at_start=not cuts)

    def _encode_together(self, run: list[tuple[Text, bool]], at_start: bool) -> list[Cut]:
        text = "".join(piece for piece, _ in run)
        ids = self.tokenizer.encode(text, specials=True)
        wanted = [self._controls[piece] for piece, is_control in run if is_control]
        texts = {token: piece for piece, token in self._controls.items()}
        places = [i for i, token in enumerate(ids) if token in texts and texts[token] in text]
        if [ids[place] for place in places] != wanted:
            return self._encode_apart(run, at_start)
        cuts, done, left = [], 0, list(reversed(places))
        for piece, is_control in run:
            end = done + 1 if is_control else (left[-1] if left else len(ids))
            cuts.append(Cut(piece, ids[done:end]))
            done = end
            if is_control:
                left.pop()
        return cuts

    def _encode_apart(self, run: list[tuple[Text, bool]], at_start: bool) -> list[Cut]:
        cuts: list[Cut] = []
        for piece, is_control in run:
            ids = [self._controls[piece]] if is_control else None
            cuts.append(Cut(piece, ids or self._encode_text(piece, at_start and not cuts)))
        return cuts

    def _encode_text(self, text: str, at_start: bool) -> list[int]:
        """The caller's text, in which no control token may come about."""
        ids = self._encode_inside(text, at_start)
        spelled = [control for control in self._controls if len(control) > 1 and control in text]
        if all(self._controls[control] not in ids for control in spelled):
            return ids
        # The vocabulary has the control token as an ordinary piece too: break each in two.
        ids, at = [], 0
        while found := self._control_pattern.search(text, at):
            ids += self._encode_inside(text[at : found.start() + 1], at_start and at == 0)
            at = found.start() + 1
        return ids + self._encode_inside(text[at:], at_start and at == 0)

    def _encode_inside(self, text: str, at_start: bool) -> list[int]:
        if at_start or not self._start_differs:
            return self.tokenizer.encode(text)
        # Behind a line break the text is not at a start any more; then take the line break off.
        lead = self.tokenizer.encode("\n")
        ids = self.tokenizer.encode("\n" + text)
        if ids[: len(lead)] == lead:
            return ids[len(lead) :]
        return self.tokenizer.encode(text)

    @cached_property
    def _start_differs(self) -> bool:
        """Whether text at the very start is encoded unlike text behind a control token."""
        encode = self.tokenizer.encode
        return any(
            encode(control + "a", specials=True)[1:] != encode("a")
            for control in list(self.tokenizer.special_tokens)[:1]
        )


def _last_text(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Where the text is that the message ends with, as a mapping and a key."""
    content = message.get("content")
    return (content[-1], "text") if isinstance(content, list) and content else (message, "content")


def _leave_open(message: dict[str, Any]) -> None:
    """Give the end of the message's content an origin of its own.

    A message without words gets one character, so that its place can be seen.
    """
    place, key = _last_text(message)
    if not isinstance(place.get(key), str):
        raise UnspoolError("the last message has no text to continue: give it content")
    blank = not place[key].strip()
    place[key] = Text(place[key], _OPEN) + Text("." * blank, _BLANK)


def _open_mark(message: dict[str, Any]) -> str | None:
    place, key = _last_text(message)
    mark = origin_of(place.get(key) or "")[-1:]
    return mark if mark in (_OPEN, _BLANK) else None
