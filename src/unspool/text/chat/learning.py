"""Which tokens of a conversation a model is to learn: those that the assistant writes.

A template may say so itself, with `{% generation %}` tags, as transformers reads them. Else the
message's own span is taken (`spans.py`), without the words that ask for the turn, which the model
is given, and up to the token that ends it, which the model must write. Whatever stands between
them counts, be it words, thoughts or calls of tools.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from unspool.text.chat.messages import Message
from unspool.text.chat.origin import Text, is_template, origin_of
from unspool.text.chat.rewrite import GENERATION_EDGE
from unspool.text.chat.spans import Cut, message_starts, tokens_within
from unspool.text.chat.template import ChatTemplate


@dataclass(frozen=True)
class Lesson:
    """A conversation as ids, and which of them the assistant wrote."""

    ids: list[int]
    counted: list[bool]
    text: str


def counted_tokens(
    chat: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    end_ids: Collection[int] = (),
) -> Lesson:
    """The conversation as a lesson. A message with `weight: 0` does not count."""

    def lesson(turns: Sequence[Message]) -> Lesson:
        shown = [{key: turn[key] for key in turn if key != "weight"} for turn in turns]
        marked = chat.render_marked(shown, tools=tools, add_generation_prompt=False)
        text, blocks = _without_edges(marked)
        cuts = chat.cuts(text)
        ids = [token for cut in cuts for token in cut.ids]
        counted = [False] * len(ids)
        starts = [*message_starts(origin_of(text), len(turns)), len(text)]
        for turn, span in zip(turns, pairwise(starts), strict=True):
            if turn["role"] != "assistant" or turn.get("weight") == 0:
                continue
            for begin, end in _stretches(chat, text, span, blocks, cuts, end_ids):
                counted[begin:end] = [True] * (end - begin)
        return Lesson(ids, counted, str.__str__(text))

    return chat.in_turns(lesson, messages, {})


def _without_edges(marked: Text) -> tuple[Text, list[tuple[int, int]]]:
    """The text without its marks, and the places of what stood between them."""
    origin = origin_of(marked)
    edges = [
        found.start()
        for found in re.finditer(GENERATION_EDGE, marked)
        if is_template(origin[found.start()])
    ]
    bounds = [-1, *edges, len(marked)]
    pieces = [(a + 1, b) for a, b in pairwise(bounds)]
    plain = str.__str__(marked)
    text = Text("".join(plain[a:b] for a, b in pieces), "".join(origin[a:b] for a, b in pieces))
    places = [edge - number for number, edge in enumerate(edges)]
    return text, list(zip(places[::2], places[1::2], strict=True))


def _stretches(
    chat: ChatTemplate,
    text: Text,
    span: tuple[int, int],
    blocks: Sequence[tuple[int, int]],
    cuts: Sequence[Cut],
    end_ids: Collection[int],
) -> list[tuple[int, int]]:
    """The tokens of one assistant message that count, as (begin, end)."""
    token_bytes = chat.tokenizer.token_bytes
    if chat.marks_generation:
        inside = [(begin, end) for begin, end in blocks if span[0] <= begin < span[1]]
        return [tokens_within(cuts, begin, end, token_bytes) for begin, end in inside]
    begin, end = tokens_within(cuts, _behind_prompt(chat, text, *span), span[1], token_bytes)
    ids = [token for cut in cuts for token in cut.ids]
    ends = [place for place in range(begin, end) if ids[place] in end_ids]
    return [(begin, ends[-1] + 1 if ends else end)]


def _behind_prompt(chat: ChatTemplate, text: Text, begin: int, end: int) -> int:
    """Where the model begins to write: behind what asks it for its turn."""
    prompt = chat.generation_prompt
    found = text.find(prompt.rstrip(), begin, end) if prompt.strip() else -1
    own = next((n for n in range(begin, end) if not is_template(origin_of(text)[n])), end)
    if begin <= found <= own:
        begin = found
    most, same = min(end - begin, len(prompt)), 0
    while same < most and text[begin + same] == prompt[same]:
        same += 1
    return begin + same
