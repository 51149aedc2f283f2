"""How a branch begins: a prompt read into tokens, and what in it nobody wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from unspool.serve.core.state import Call
from unspool.serve.http.errors import bad_request
from unspool.serve.openai.chat_prompt import ToolUse, chat_prompt, template_message
from unspool.serve.tree.branches import ExtraSettings, MessageSpan, TreeBranch, TreePrompt
from unspool.serve.tree.schema import DEFAULT_TOKENS, GRAMMARS, CreateRequest, WriteOptions
from unspool.text.chat.template import ChatPrompt
from unspool.text.tokenizer.tokenizer import Tokenizer

# Every step of a branch is told in full, unless somebody says otherwise.
TOLD = {"explain": True, "top": WriteOptions.model_fields["top"].default}

_EXTRA_SETTINGS = ("guard", *GRAMMARS, "speculate", "end", "cache", "think_budget")


def new_branch(call: Call, body: CreateRequest) -> TreeBranch:
    """A branch without steps, all its settings checked; on a thread, since it takes its time."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    lm = call.served.lm
    options = {name: value for name, value in body.settings().items() if value is not None}
    prompt = _from_text(call, body.prompt) if body.prompt is not None else _from_chat(call, body)
    options["thoughts"] = prompt.messages is not None
    call.check_prompt(len(prompt.ids))
    options["stop"] = (*options.get("stop", ()), *prompt.stops)
    options["max_tokens"] = call.token_limit(body.max_tokens, len(prompt.ids), DEFAULT_TOKENS)
    return TreeBranch(
        call.served.name,
        prompt,
        replace(lm.draft(prompt.ids, **{**TOLD, **options}), source=None),
        merged_settings(body),
        body.max_tokens,
        name=body.name,
    )


def turn(call: Call, branch: TreeBranch, message: dict[str, Any]) -> list[int]:
    """What the template puts behind an answer when this message follows it.

    What was written stays as it is, token by token: only what comes behind it is encoded.
    """
    if branch.prompt.messages is None:
        raise bad_request("the branch did not begin with messages; give text", "message")
    call.check_text(str(message.get("content", "")))
    said = branch.generation.answer.strip() or branch.generation.text.strip()
    messages = [*branch.prompt.messages, {"role": "assistant", "content": said}, message]
    template = call.served.lm.chat_template
    # A template that would leave the thought out from now on is not asked: all that was written
    # stays, its thought too.
    behind = template.encode_behind if said else template.encode_after
    ids = behind(messages, len(messages) - 2)
    if ids is None:
        raise bad_request("this chat template leaves the answer out when more follows", "message")
    # The answer may have ended with the very token that the template writes after it.
    ends = call.served.lm.end_ids
    ended = bool(branch.steps) and branch.steps[-1].token in ends
    return ids[1:] if ended and ids and ids[0] in ends else ids


def merged_settings(body: WriteOptions, before: ExtraSettings | None = None) -> ExtraSettings:
    """The settings that no sampling stage reads, as they came; a new grammar replaces the old."""
    given = body.given
    if before is not None and not given & {*_EXTRA_SETTINGS}:
        return before
    defaults = dict.fromkeys(_EXTRA_SETTINGS) | {"end": True, "cache": True}
    found = defaults if before is None else dict(before.values)
    if given & {*GRAMMARS}:
        found.update(dict.fromkeys(GRAMMARS))
    found.update({name: getattr(body, name) for name in _EXTRA_SETTINGS if name in given})
    return ExtraSettings(found)


def _from_text(call: Call, given: str | list[int]) -> TreePrompt:
    lm = call.served.lm
    if isinstance(given, str):
        call.check_text(given)
    ids = tuple(lm.prompt_ids(given))
    started = isinstance(given, str) and lm.tokenizer.add_bos
    return TreePrompt(
        ids,
        given if isinstance(given, str) else lm.tokenizer.decode(ids),
        lm.tokenizer,
        frozenset({0}) if started else frozenset(),
    )


def _from_chat(call: Call, body: CreateRequest) -> TreePrompt:
    assert body.messages is not None
    messages = [template_message(message) for message in body.messages]
    call.check_text(*(str(message.get("content", "")) for message in messages))
    chat = chat_prompt(call.served, messages, ToolUse(), {})
    tokenizer = call.served.lm.tokenizer
    spans = _spans(tokenizer, chat, messages)
    written = {
        place for span in spans if span.content is not None for place in range(*span.content)
    }
    return TreePrompt(
        tuple(chat.ids),
        chat.text,
        tokenizer,
        frozenset(range(len(chat.ids))) - written,
        messages,
        spans,
        call.served.lm.chat_template.stops,
    )


def _spans(
    tokenizer: Tokenizer, chat: ChatPrompt, messages: Sequence[dict[str, Any]]
) -> tuple[MessageSpan, ...]:
    contents: list[str | None] = [message.get("content") for message in messages]
    if len(contents) != len(chat.spans):  # the format has put some messages together
        contents = [None] * len(chat.spans)
    found = [
        MessageSpan(
            span.role,
            span.start,
            span.end,
            _content(tokenizer, chat.ids, span.start, span.end, words or ""),
        )
        for span, words in zip(chat.spans, contents, strict=True)
    ]
    asks = chat.generation
    if asks is not None:
        found.append(MessageSpan(asks.role, asks.start, asks.end, None))
    return tuple(found)


def _content(
    tokenizer: Tokenizer, ids: Sequence[int], start: int, end: int, words: str
) -> tuple[int, int] | None:
    """The tokens in which a message's own words stand; templates may trim these."""
    wanted = words.strip().encode("utf-8", "replace")
    pieces = [tokenizer.token_bytes(token) for token in ids[start:end]]
    # The last place: a template may say the same words before, of its own accord.
    place = b"".join(pieces).rfind(wanted) if wanted else -1
    if place < 0:
        return None
    first = last = None
    at = 0
    for number, piece in enumerate(pieces, start):
        if at < place + len(wanted) and at + len(piece) > place:
            first = number if first is None else first
            last = number + 1
        at += len(piece)
    return None if first is None or last is None else (first, last)
