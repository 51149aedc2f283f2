"""Which tokens belong to which message.

The template tells where a message begins (it is asked to leave a sign where its loop takes the next
one). A message that no loop takes, such as a system prompt that the template pulls to the front or
into the first user turn, is found by its words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Span:
    """The tokens `ids[start:end]` of one message, the template's words around it included."""

    role: str
    start: int
    end: int


@dataclass(frozen=True)
class Cut:
    """A stretch of text and the ids it became; cuts follow each other without gaps."""

    text: str
    ids: list[int]


def message_starts(
    text: str,
    contents: Sequence[str],
    known: Mapping[int, int],
    controls: Collection[str],
    *,
    with_end: bool,
) -> list[int]:
    """Where each message begins; with `with_end` also where the last one ends.

    `contents` are the words of the messages, `known` the places that are known already.
    """
    ender = re.compile(
        r"\s?(?:" + "|".join(map(re.escape, sorted(controls, key=len, reverse=True))) + r")?\n?"
    )
    starts = [0]
    for number, content in enumerate(contents):
        begin = starts[-1]
        following = known.get(number + 1, -1)
        limit = known.get(number + 2, len(text))  # not in a later message, whose words it shares
        place = text.find(content, begin, limit) if content else -1
        if following >= begin and (number in known or place < 0):
            starts.append(following)
        elif place < 0:
            starts.append(begin)
        else:
            end = place + len(content)
            if following < end:
                closed = ender.match(text, end)
                end = closed.end() if closed and following < 0 else end
            starts.append(max(end, following))
    if with_end:
        return starts
    return starts[:-1]


def token_spans(
    cuts: Sequence[Cut], starts: Sequence[int], token_bytes: Callable[[int], bytes]
) -> list[tuple[int, int]]:
    """From places in the text to places in the ids: (start, end) of each, without gaps."""
    total = sum(len(cut.ids) for cut in cuts)
    borders = [_token_at(cuts, start, token_bytes) for start in starts[1:]]
    edges = [0, *borders, total]
    return [(min(a, total), max(a, b)) for a, b in pairwise(edges)]


def _token_at(cuts: Sequence[Cut], place: int, token_bytes: Callable[[int], bytes]) -> int:
    """The first token that begins at this place of the text or behind it."""
    chars = tokens = 0
    for cut in cuts:
        if place <= chars:
            return tokens
        if place < chars + len(cut.text):
            # Counted from the end, because an encoder may put a space before the text.
            rest = len(cut.text[place - chars :].encode("utf-8", "replace"))
            inside = len(cut.ids)
            while inside and (rest := rest - len(token_bytes(cut.ids[inside - 1]))) >= 0:
                inside -= 1
            return tokens + inside
        chars += len(cut.text)
        tokens += len(cut.ids)
    return tokens
