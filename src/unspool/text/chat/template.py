"""Messages to token ids, by the checkpoint's own chat template.

    chat = ChatTemplate(tokenizer.chat_template, tokenizer)
    prompt = chat.encode([{"role": "user", "content": "Why do leaves change color in fall?"}])
    prompt.ids, prompt.text, prompt.spans

The text is what transformers renders from the same template, and the ids are what it makes of that
text, with one difference: a control token spelled in a message, a tool or any other string of the
caller is text. Only the template writes control tokens (see `marks.py` for how they are told
apart). As in transformers no start token is put before the text: a template that wants one
writes it.

A model without a template gets plain lines, one per message, and the start token if it wants one:

    System: You are a poet.
    User: Why do leaves change color in fall?
    Assistant:
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Protocol

from unspool.errors import SettingsError, UnspoolError
from unspool.text.chat.marks import Marks, all_strings, unused_characters
from unspool.text.chat.messages import Message, checked_messages, joined_parts, plain_json
from unspool.text.chat.sandbox import SandboxedTemplate
from unspool.text.chat.spans import Cut, Span, message_starts, token_spans

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


@dataclass(frozen=True)
class _Rendering:
    variables: dict[str, Any]  # the template's, marked
    marks: Marks
    message_mark: str
    end_mark: str  # where a half-written message ends
    now: datetime
    text: str  # with marks


class ChatTemplate:
    """One chat template and the tokenizer that it writes for."""

    def __init__(self, source: str | None, tokenizer: TokenizerLike) -> None:
        self.is_plain = source is None
        self._template = SandboxedTemplate(PLAIN_TEMPLATE if source is None else source)
        self._tokenizer = tokenizer

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings that a chat in this format needs, beside the model's end tokens."""
        return PLAIN_STOPS if self.is_plain else ()

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The text of a conversation.

        `add_generation_prompt` (the default) ends it with what asks for the assistant's turn;
        `continue_final_message` ends it right behind the last message's content instead, so that
        the model goes on writing that message. `extra` goes to the template: `documents`,
        `enable_thinking` and whatever else it knows.
        """
        done = self._render(messages, add_generation_prompt, continue_final_message, tools, extra)
        return done.marks.plain(done.text)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> ChatPrompt:
        """The conversation as token ids, with the tokens of each message; options as in `render`"""
        done = self._render(messages, add_generation_prompt, continue_final_message, tools, extra)
        text = done.marks.plain(done.text)
        cuts = self._encode(done.text, done.marks)
        starts = self._starts(done, text)
        spans = token_spans(cuts, starts, self._tokenizer.token_bytes)
        given = done.variables["messages"]
        roles = [done.marks.plain(message["role"]) for message in given]
        generation = None
        if done.variables["add_generation_prompt"]:
            start, end = spans.pop()
            generation = Span("assistant", start, end)
        return ChatPrompt(
            ids=[token for cut in cuts for token in cut.ids],
            spans=tuple(
                Span(role, start, end) for role, (start, end) in zip(roles, spans, strict=True)
            ),
            generation=generation,
            text=text,
        )

    def encode_after(self, messages: Sequence[Message], index: int) -> list[int] | None:
        """The ids of what the template writes behind the content of message `index`.

        A conversation that is kept as ids goes on with these, so that what the model wrote is not
        encoded again. None if the template changes that message once others follow it.
        """
        done = self._render(messages, None, False, None, {})
        kept = self.render(messages[: index + 1], continue_final_message=True)
        if not done.marks.plain(done.text).startswith(kept):
            return None
        ids: list[int] = []
        behind = -len(kept)  # where the next cut begins, counted from the end of what is kept
        for cut in self._encode(done.text, done.marks):
            inside = max(0, -behind)
            if inside == 0:
                ids += cut.ids
            elif inside < len(cut.text):
                ids += self._encode_inside(cut.text[inside:], at_start=False)
            behind += len(cut.text)
        return ids

    # Rendering.

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        extra: Mapping[str, Any],
    ) -> _Rendering:
        if continue_final_message and add_generation_prompt:
            raise SettingsError(
                "continue_final_message goes on with the last message and add_generation_prompt"
                " begins a new one: give only one of them"
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        given = checked_messages(messages)
        if not self._reads_parts:
            given = [joined_parts(message) for message in given]
        caller = {
            **plain_json(dict(extra), "template options"),
            "messages": given,
            "tools": plain_json(tools, "tools"),
        }
        caller.setdefault("documents", None)
        mark, message_mark, end_mark = unused_characters(
            3, [*all_strings(caller), *self._controls, self._template.literals]
        )
        marks = Marks(mark, self._controls)
        variables = {
            **self._token_names,
            **{name: value if name.endswith("_token") else marks.protect(value)
               for name, value in caller.items()},
            "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        if continue_final_message:
            _leave_open(variables["messages"][-1], end_mark)
        now = datetime.now()
        text = self._template.render(variables, marks=marks, now=now)
        if continue_final_message:
            text = _cut_open(text, end_mark)
        return _Rendering(variables, marks, message_mark, end_mark, now, text)

    @cached_property
    def _token_names(self) -> dict[str, str]:
        """`bos_token` and its like, as far as the model has them."""
        names = {}
        for name in ("bos", "eos", "unk", "pad"):
            token = getattr(self._tokenizer, f"{name}_id", None)
            if token is not None:
                names[f"{name}_token"] = self._tokenizer.token_text(token)
        if self._tokenizer.add_bos and "bos_token" in names:
            names["start_token"] = names["bos_token"]  # for the plain template
        return names

    @cached_property
    def _controls(self) -> dict[str, int]:
        """The tokens that only the template may write.

        Those that the tokenizer calls special; and those like `<tool_call>` that it does not call
        so, but that the template spells and that are one token.
        """
        controls = {
            text: token for text, token in self._tokenizer.special_tokens.items() if text.strip()
        }
        for text in set(
            re.findall(r"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,60}\]", self._template.literals)
        ):
            if text not in controls:
                ids = self._tokenizer.encode(text, specials=True)
                if len(ids) == 1 and self._tokenizer.token_text(ids[0]) == text:
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

    def _encode(self, text: str, marks: Marks) -> list[Cut]:
        """The rendered text as runs of ids; each run also knows the text it stands for.

        As much as possible is encoded in one go, because some vocabularies treat the start of a
        text differently. Only a piece in which the caller spelled a control token goes alone.
        """
        together: list[tuple[str, bool]] = []
        cuts: list[Cut] = []
        for piece, is_control in marks.pieces(text):
            if is_control or not any(found for _, found in marks.pieces(marks.plain(piece))):
                together.append((piece, is_control))
                continue
            cuts += self._encode_together(together, marks, at_start=not cuts)
            cuts += self._encode_apart([(piece, False)], marks, at_start=not cuts)
            together = []
        return cuts + self._encode_together(together, marks, at_start=not cuts)

    def _encode_together(
        self, run: list[tuple[str, bool]], marks: Marks, at_start: bool
    ) -> list[Cut]:
        text = "".join(marks.plain(piece) for piece, _ in run)
        ids = self._tokenizer.encode(text, specials=True)
        wanted = [self._controls[piece] for piece, is_control in run if is_control]
        texts = {token: piece for piece, token in self._controls.items()}
        places = [i for i, token in enumerate(ids) if token in texts and texts[token] in text]
        if [ids[place] for place in places] != wanted:
            return self._encode_apart(run, marks, at_start)
        cuts, done, left = [], 0, list(reversed(places))
        for piece, is_control in run:
            end = done + 1 if is_control else (left[-1] if left else len(ids))
            cuts.append(Cut(marks.plain(piece), ids[done:end]))
            done = end
            if is_control:
                left.pop()
        return cuts

    def _encode_apart(self, run: list[tuple[str, bool]], marks: Marks, at_start: bool) -> list[Cut]:
        cuts: list[Cut] = []
        for piece, is_control in run:
            if is_control:
                cuts.append(Cut(piece, [self._controls[piece]]))
            else:
                ids = self._encode_text(piece, marks, at_start and not cuts)
                cuts.append(Cut(marks.plain(piece), ids))
        return cuts

    def _encode_text(self, marked: str, marks: Marks, at_start: bool) -> list[int]:
        """The caller's text, in which no control token may come about."""
        text = marks.plain(marked)
        ids = self._encode_inside(text, at_start)
        forbidden = {token for spelled, token in self._controls.items() if spelled in text}
        if forbidden.isdisjoint(ids):
            return ids
        # The vocabulary has the control token as an ordinary piece too: break it at the marks.
        parts = [part for part in marked.split(marks.mark) if part]
        return [
            token
            for i, part in enumerate(parts)
            for token in self._encode_inside(part, at_start and i == 0)
        ]

    def _encode_inside(self, text: str, at_start: bool) -> list[int]:
        if at_start or not self._start_differs:
            return self._tokenizer.encode(text)
        # Behind a line break the text is not at a start any more; then take the line break off.
        lead = self._tokenizer.encode("\n")
        ids = self._tokenizer.encode("\n" + text)
        if ids[: len(lead)] == lead:
            return ids[len(lead) :]
        return self._tokenizer.encode(text)

    @cached_property
    def _start_differs(self) -> bool:
        """Whether text at the very start is encoded unlike text behind a control token."""
        encode = self._tokenizer.encode
        return any(
            encode(control + "a", specials=True)[1:] != encode("a")
            for control in list(self._tokenizer.special_tokens)[:1]
        )

    def _starts(self, done: _Rendering, text: str) -> list[int]:
        """Where in the text each message begins, and then the generation prompt, if any."""
        given, marks = done.variables["messages"], done.marks
        signs = {id(each): f"{done.message_mark}{i}{done.message_mark}"
                 for i, each in enumerate(given)}  # fmt: skip
        asks = done.variables["add_generation_prompt"]
        try:
            signed = self._template.render(
                {**done.variables, "add_generation_prompt": False},
                marks=marks,
                now=done.now,
                message_marks=signs,
            )
        except UnspoolError:  # a template that insists on the generation prompt
            signed = ""
        found: dict[int, int] = {}
        before = ""
        sign = re.compile(f"{done.message_mark}(\\d+){done.message_mark}")
        for i, part in enumerate(sign.split(marks.plain(signed))):
            if i % 2:
                found[int(part)] = len(before)  # the last time counts: earlier loops only look
            else:
                before += part
        before = before.partition(done.end_mark)[0]
        alike = _alike(text, before)
        found = {number: place for number, place in found.items() if place <= alike}
        contents = [marks.plain(_content_text(each)).replace(done.end_mark, "") for each in given]
        starts = message_starts(text, contents, found, self._controls, with_end=asks)
        if asks and alike == len(before) > 0:
            starts[-1] = max(starts[-2], alike)
        return starts


def _alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _content_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = next((part["text"] for part in reversed(content) if "text" in part), "")
    return content.strip() if isinstance(content, str) else ""


def _leave_open(message: dict[str, Any], end_mark: str) -> None:
    """Put a sign at the end of the message's content; a space shows whether it gets trimmed."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + end_mark + " "
        return
    for part in reversed(content or []):
        if "text" in part:
            part["text"] += end_mark + " "
            return
    raise UnspoolError("the last message has no text to continue: give it content")


def _cut_open(text: str, end_mark: str) -> str:
    end = text.rfind(end_mark)
    if end < 0:
        raise UnspoolError(
            "the chat template leaves the last message out, so it cannot be continued: end with"
            " an assistant message"
        )
    kept = text[:end]
    return kept if text[end + 1 : end + 2] == " " else kept.rstrip()
