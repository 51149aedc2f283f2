"""The loss mask of a conversation: which tokens the model is trained on.

These are the assistant's tokens. A template may mark them with `{% generation %}` tags, as in
transformers. Otherwise the span of each assistant message is used, without the generation prompt,
which the model is given, and up to the end token, which the model must write. Text, reasoning and
tool calls in between all count.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from unspool.text.chat.messages import Message
from unspool.text.chat.sandbox import GENERATION_EDGE, OriginText, is_template, origin_of
from unspool.text.chat.template import ChatTemplate, EncodedPart, message_starts, tokens_within


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
