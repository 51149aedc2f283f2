"""The token spans of messages in a rendered conversation.

The origin of each character (`origin.py`) names its message: the caller's text belongs to the
message that contains it, the template's text to the message whose loop iteration wrote it. A
message outside of any loop, such as a system prompt that the template moves to the front or into
the first user turn, is located by its text alone.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise


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
