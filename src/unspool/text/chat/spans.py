"""Which tokens belong to which message.

Each character of the rendered text says which message it belongs to (`origin.py`): the caller's
words to the message they stand in, the template's to the message that its loop has in turn. A
message that no loop takes, such as a system prompt that the template pulls to the front or into the
first user turn, is found by its words alone.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
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


def message_starts(origin: str, count: int) -> list[int]:
    """Where each of `count` messages begins in a text with these origins, one a character."""
    runs = [(ord(found[1]), *found.span()) for found in re.finditer(r"(?s)(.)\1*", origin)]
    begins = [begin for _, begin, _ in runs]
    words: dict[int, list[tuple[int, int]]] = {}  # message -> where its own words stand
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
    cuts: Sequence[Cut], starts: Sequence[int], token_bytes: Callable[[int], bytes]
) -> list[tuple[int, int]]:
    """From places in the text to places in the ids: (start, end) of each, without gaps."""
    edges, chars, tokens = [0], 0, 0
    for cut in cuts:
        behind = chars + len(cut.text)
        while len(edges) < len(starts) and starts[len(edges)] < behind:
            place = max(0, starts[len(edges)] - chars)
            edges.append(tokens + _token_at(cut, place, token_bytes))
        chars, tokens = behind, tokens + len(cut.ids)
    edges += [tokens] * (len(starts) + 1 - len(edges))
    return [(a, max(a, b)) for a, b in pairwise(edges)]


def _token_at(cut: Cut, place: int, token_bytes: Callable[[int], bytes]) -> int:
    """The first token of a cut that begins at this place of its text or behind it."""
    if place == 0:
        return 0
    # Counted from the end, because an encoder may put a space before the text.
    rest = len(cut.text[place:].encode("utf-8", "replace"))
    inside = len(cut.ids)
    while inside and (rest := rest - len(token_bytes(cut.ids[inside - 1]))) >= 0:
        inside -= 1
    return inside


def tokens_within(
    cuts: Sequence[Cut], begin: int, end: int, token_bytes: Callable[[int], bytes]
) -> tuple[int, int]:
    """The tokens that hold any of the characters from `begin` to `end`: (first, behind the last)"""
    if begin >= end:
        return 0, 0
    first = last = chars = tokens = 0
    for cut in cuts:
        behind = chars + len(cut.text)
        if chars <= begin < behind:
            first = tokens + _edge(cut, begin - chars, token_bytes, before=True)
        if chars < end <= behind:
            last = tokens + _edge(cut, end - chars, token_bytes, before=False)
        chars, tokens = behind, tokens + len(cut.ids)
    return first, last


def _edge(cut: Cut, place: int, token_bytes: Callable[[int], bytes], *, before: bool) -> int:
    """The token of a cut that begins at this place of its text; the one before or behind it, if
    none does. Counted from the end, because an encoder may put a space before the text."""
    rest = len(cut.text[place:].encode("utf-8", "replace"))
    inside, length = len(cut.ids), 0
    while inside:
        further = length + len(token_bytes(cut.ids[inside - 1]))
        if length >= rest if before else further > rest:
            break
        inside, length = inside - 1, further
    return inside
