"""Tokens of an edited text: only the tokens around the edit change."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

_REACH = 64  # tokens on each side that are encoded with the new text


def splice_tokens(
    left_ids: Sequence[int],
    text: str,
    right_ids: Sequence[int],
    encode: Callable[[str, bool], list[int]],
    token_bytes: Callable[[int], bytes],
    *,
    canonical: bool = False,
) -> tuple[int, list[int], int]:
    """Return the tokens for `text` between two runs of tokens, and how many of these stay.

    The text is encoded together with its neighbors. The nearest places where both tokenizations
    have an edge bound the new tokens; outside them the tokens stay what they are, also where the
    tokenizer would choose others (a model may write a word in unusual tokens).

    Args:
        left: The tokens before the text, from the start of a run of ordinary text.
        text: The new text; may be empty.
        right_ids: The tokens after it, to the end of the run.
        encode: Encodes a text; the second argument is whether it starts the run.
        token_bytes: The bytes of a token.
        canonical: The run gets the tokens of encoding it as one text.

    Returns:
        (number of `left_ids` that stay, the new tokens, number of `right_ids` that stay).
    """
    first = 0 if canonical else max(0, len(left_ids) - _REACH)
    last = len(right_ids) if canonical else min(len(right_ids), _REACH)
    before = [token_bytes(token) for token in left_ids[first:]]
    after = [token_bytes(token) for token in right_ids[:last]]
    while before and _starts_inside_character(before[0]):  # so that the bytes are a text
        first, before = first + 1, before[1:]
    prefix, suffix = b"".join(before), b"".join(after)
    data = text.encode("utf-8", "surrogatepass")
    try:
        joined = (prefix + data + suffix).decode()
    except UnicodeDecodeError:  # tokens that are no text: encode the new text alone
        return len(left_ids), encode(text, not left_ids) if text else [], len(right_ids)
    ids, edges = _encode_edges(joined, first == 0, encode, token_bytes)
    if edges is None:  # the tokenizer normalizes the text
        return len(left_ids), encode(text, not left_ids) if text else [], len(right_ids)
    if canonical:
        num_left = _num_common(left_ids, ids)
        num_right = _num_common(right_ids[::-1], ids[num_left:][::-1])
        return num_left, ids[num_left : len(ids) - num_right], num_right
    left_ends = [0, *accumulate(map(len, before))]
    num_left = next(n for n in range(len(before), -1, -1) if _has(edges, left_ends[n]))
    start = left_ends[num_left]
    right_start = len(prefix) + len(data)
    right_starts = [right_start, *(right_start + end for end in accumulate(map(len, after)))]
    num_dropped = next(n for n, at in enumerate(right_starts) if _has(edges, at))
    new = ids[bisect_left(edges, start) : bisect_left(edges, right_starts[num_dropped])]
    return first + num_left, new, len(right_ids) - num_dropped


def _starts_inside_character(data: bytes) -> bool:
    return bool(data) and 0x80 <= data[0] < 0xC0


def _encode_edges(
    text: str,
    at_start: bool,
    encode: Callable[[str, bool], list[int]],
    token_bytes: Callable[[int], bytes],
) -> tuple[list[int], list[int] | None]:
    """The tokens of a text, and where each starts and ends in its bytes; None: in another text."""
    if not text:
        return [], [0]
    length = len(text.encode())
    ids = encode(text, at_start)
    edges = [0, *accumulate(len(token_bytes(token)) for token in ids)]
    if edges[-1] == length + 1 and at_start:  # the encoder puts a space before the text
        if text[0] == " ":  # as it has done for the tokens on the left
            ids = encode(text[1:], at_start)
            edges = [0, *accumulate(len(token_bytes(token)) for token in ids)]
        else:
            edges = [0, *(edge - 1 for edge in edges[1:])]
    return ids, edges if edges[-1] == length else None


def _has(edges: Sequence[int], at: int) -> bool:
    index = bisect_left(edges, at)
    return index < len(edges) and edges[index] == at


def _num_common(first_ids: Sequence[int], second_ids: Sequence[int]) -> int:
    count = 0
    for a, b in zip(first_ids, second_ids, strict=False):
        if a != b:
            break
        count += 1
    return count
