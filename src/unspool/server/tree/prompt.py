"""The prompt of a new branch: its tokens, and which of them the template added."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from unspool.server.dialects.chat_prompt import Message, ToolUse, chat_prompt, template_message
from unspool.server.http.errors import bad_request
from unspool.server.runtime.schema import (
    MAX_STOPS,
    Bias,
    Extension,
    Seed,
    StopStrings,
    Strict,
    Tokens,
    biases,
    parse_interventions,
    stops,
)
from unspool.server.runtime.state import Call
from unspool.server.tree.branches import ExtraSettings, MessageSpan, TreeBranch, TreePrompt
from unspool.server.tree.parts import NAMES as PART_NAMES
from unspool.server.tree.parts import ContextFields
from unspool.text.chat.template import ChatPrompt
from unspool.text.tokenizer.tokenizer import Tokenizer

MAX_NAME = 200  # characters
Name = Annotated[str, StringConstraints(max_length=MAX_NAME)]
Words = Annotated[str, StringConstraints(min_length=1)]
Place = Annotated[int, Field(gt=-(1 << 31), lt=1 << 31)]
Pace = Annotated[float, Field(gt=0, le=1e6)]

GRAMMARS = ("regex", "grammar", "choice", "json_schema")
DEFAULT_TOKENS = 256  # most tokens of one resume


class WriteOptions(ContextFields, Extension):
    """Settings of a branch. Every step is traced unless `trace` is false."""

    seed: Seed | None = Field(None, description="null: a new random one")
    stop: StopStrings | None = None
    logit_bias: Bias | None = None
    max_tokens: int | None = Field(
        None, ge=1, lt=1 << 31, description=f"most tokens of one resume ({DEFAULT_TOKENS})"
    )
    think_budget: int | None = Field(
        None, ge=0, lt=1 << 31, description="end the reasoning after this many tokens"
    )
    trace: bool = Field(True, description="each step has the record of every sampling stage")

    @property
    def setting_names(self) -> set[str]:
        """The settings that this request names."""
        return self.model_fields_set & (WriteOptions.model_fields.keys() - {"max_tokens"})

    def settings(self) -> dict[str, Any]:
        """Options of `LanguageModel.stream` that the request sets; null means the default."""
        names = self.setting_names.difference(PART_NAMES)
        return {_NAMES.get(name, name): self._setting(name) for name in sorted(names)}

    def _setting(self, name: str) -> Any:
        value = getattr(self, name)
        if name == "return_" and value is not None:
            raise bad_request(
                "return is not for branches: GET /v1/tree/ID/look has the vectors of a position",
                "return",
            )
        if name == "seed":
            return secrets.randbits(32) if value is None else value
        if name == "stop":
            return stops(value)
        if name == "logit_bias":
            return biases(value)
        if name == "guard" and isinstance(value, list) and not 0 < len(value) <= MAX_STOPS:
            raise bad_request(f"guard may name 1 to {MAX_STOPS} guards", "guard")
        if name == "interventions":
            return parse_interventions(value or [])
        return tuple(value) if name == "stages" and value is not None else value


_NAMES = {"trace": "explain"}  # the name in `LanguageModel.stream`


class CreateRequest(WriteOptions):
    """A prompt: text, token ids, or a conversation."""

    model: str | None = None
    name: Name | None = None
    session: str | None = Field(None, max_length=200, description="of `/v1/tree/sessions`")
    prompt: str | Tokens | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None


class BookmarkItem(Strict):
    """A marked step."""

    at: int = Field(ge=-1, lt=1 << 31, description="a step; -1: the prompt")
    label: Name = ""


class BranchUpdate(ContextFields):
    """A new name, session, bookmarks or context, or a new pace for the running resume."""

    name: Name | None = None
    bookmarks: list[BookmarkItem] | None = Field(None, max_length=1000)
    session: str | None = Field(None, max_length=200, description="move the branch to this session")
    pace: Pace | None = Field(None, description="most tokens a second; null: no limit")


class AppendRequest(Strict):
    """Text or tokens to append, or the next message of a conversation."""

    text: Words | None = None
    tokens: Tokens | None = None
    message: Message | None = Field(
        None, description="rendered by the chat template, up to the start of the model's turn"
    )


class ForkRequest(Strict):
    """Where to fork a branch."""

    at: Place | None = Field(None, description="steps to share; negative: from the end")
    name: Name | None = None


class RewindRequest(Strict):
    """How many steps to keep."""

    to: Place = Field(description="negative: from the end")


class ChooseRequest(Strict):
    """Another token or text at a step; the steps after it are removed."""

    at: Place | None = Field(None, description="the step to replace; by default, after the last")
    token: int | None = Field(None, ge=0, lt=1 << 31)
    text: Words | None = None
    fork: bool = Field(True, description="into a new branch; the old one stays")
    name: Name | None = None


class ResumeRequest(WriteOptions):
    """How to resume; these settings become those of the branch."""

    n: int = Field(1, ge=1, lt=1 << 31, description="1: in place; more: this many new branches")
    stream: bool = False
    pace: Pace | None = Field(None, description="most tokens a second")


# Steps of a branch are traced by default.
_TRACE = {"explain": True, "top": WriteOptions.model_fields["top"].default}

_EXTRA_SETTINGS = ("guard", *GRAMMARS, "speculate", "end", "cache", "think_budget")


def new_branch(call: Call, body: CreateRequest) -> TreeBranch:
    """Make a branch without steps, and check its settings. Slow: run it on a thread."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    lm = call.served.lm
    options = {name: value for name, value in body.settings().items() if value is not None}
    if body.messages is not None:
        prompt = chat_tree_prompt(call, [template_message(message) for message in body.messages])
    else:
        assert body.prompt is not None
        prompt = _from_text(call, body.prompt)
    options["thoughts"] = prompt.messages is not None
    call.check_prompt(len(prompt.ids))
    options["stop"] = (*options.get("stop", ()), *prompt.stops)
    options["max_tokens"] = call.token_limit(body.max_tokens, len(prompt.ids), DEFAULT_TOKENS)
    return TreeBranch(
        call.served.name,
        prompt,
        replace(lm.prepare_generation(prompt.ids, **{**_TRACE, **options}), source=None),
        merged_settings(body),
        body.max_tokens,
        name=body.name,
        session=body.session,
    )


def encode_turn(call: Call, branch: TreeBranch, message: dict[str, Any]) -> list[int]:
    """The tokens that the chat template adds after an answer for this next message.

    The generated tokens stay unchanged: only the text after them is encoded.
    """
    if branch.prompt.messages is None:
        raise bad_request("the branch has no messages; append text instead", "message")
    call.check_text(str(message.get("content", "")))
    answer = branch.generation.answer.strip() or branch.generation.text.strip()
    messages = [*branch.prompt.messages, {"role": "assistant", "content": answer}, message]
    template = call.served.lm.chat_template
    # Templates drop the reasoning of earlier turns; here all generated tokens stay.
    encode = template.encode_suffix if answer else template.encode_after
    ids = encode(messages, len(messages) - 2)
    if ids is None:
        raise bad_request("this chat template drops the answer when a message follows", "message")
    # The answer may already end with the token that the template adds after it.
    ends = call.served.lm.end_ids
    ended = bool(branch.steps) and branch.steps[-1].token in ends
    return ids[1:] if ended and ids and ids[0] in ends else ids


def merged_settings(body: WriteOptions, before: ExtraSettings | None = None) -> ExtraSettings:
    """The settings that no sampling stage reads; a new grammar replaces the old one."""
    names = body.setting_names
    if before is not None and not names & {*_EXTRA_SETTINGS}:
        return with_part_values(before, body)
    defaults = dict.fromkeys(_EXTRA_SETTINGS) | {"end": True, "cache": True}
    values = defaults if before is None else dict(before.values)
    if names & {*GRAMMARS}:
        values.update(dict.fromkeys(GRAMMARS))
    values.update({name: getattr(body, name) for name in _EXTRA_SETTINGS if name in names})
    return with_part_values(ExtraSettings(values), body)


def with_part_values(settings: ExtraSettings, body: ContextFields) -> ExtraSettings:
    """The settings with the parts of the prompt that a request gives; null removes one."""
    given = body.part_values()
    values = {name: value for name, value in settings.values.items() if name not in given}
    values.update((name, value) for name, value in given.items() if value)
    return settings if values == settings.values else ExtraSettings(values)


def _from_text(call: Call, prompt: str | list[int]) -> TreePrompt:
    lm = call.served.lm
    if isinstance(prompt, str):
        call.check_text(prompt)
    ids = tuple(lm.prompt_ids(prompt))
    has_bos = isinstance(prompt, str) and lm.tokenizer.add_bos
    return TreePrompt(
        ids,
        prompt if isinstance(prompt, str) else lm.tokenizer.decode(ids),
        lm.tokenizer,
        frozenset({0}) if has_bos else frozenset(),
    )


def chat_tree_prompt(call: Call, messages: list[dict[str, Any]]) -> TreePrompt:
    """The prompt of a conversation, formatted by the chat template."""
    call.check_text(*(str(message.get("content", "")) for message in messages))
    chat = chat_prompt(call.served, messages, ToolUse(), {})
    tokenizer = call.served.lm.tokenizer
    spans = message_spans(tokenizer, chat, messages)
    content = {
        position for span in spans if span.content is not None for position in range(*span.content)
    }
    return TreePrompt(
        tuple(chat.ids),
        chat.text,
        tokenizer,
        frozenset(range(len(chat.ids))) - content,
        messages,
        spans,
        call.served.lm.chat_template.stops,
    )


def message_spans(
    tokenizer: Tokenizer, chat: ChatPrompt, messages: Sequence[Mapping[str, Any]]
) -> tuple[MessageSpan, ...]:
    """The tokens of each message, and of the turn that the template opens for the model."""
    contents: list[str | None] = [message.get("content") for message in messages]
    if len(contents) != len(chat.spans):  # the format has merged messages
        contents = [None] * len(chat.spans)
    spans = [
        MessageSpan(
            span.role,
            span.start,
            span.end,
            _content(tokenizer, chat.ids, span.start, span.end, words or ""),
        )
        for span, words in zip(chat.spans, contents, strict=True)
    ]
    opened = chat.generation
    if opened is not None:
        spans.append(MessageSpan(opened.role, opened.start, opened.end, None))
    return tuple(spans)


def _content(
    tokenizer: Tokenizer, ids: Sequence[int], start: int, end: int, words: str
) -> tuple[int, int] | None:
    """The tokens of a message's content, which templates may trim."""
    pieces = [tokenizer.token_bytes(token) for token in ids[start:end]]
    text, content = b"".join(pieces), words.encode("utf-8", "replace")
    if content not in text:
        content = content.strip()
    # The last occurrence: the template may have the same words before it.
    place = text.rfind(content) if content else -1
    if place < 0:
        return None
    first = last = None
    at = 0
    for number, piece in enumerate(pieces, start):
        if at < place + len(content) and at + len(piece) > place:
            first = number if first is None else first
            last = number + 1
        at += len(piece)
    return None if first is None or last is None else (first, last)
