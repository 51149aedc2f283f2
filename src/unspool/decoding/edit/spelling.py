"""Words that one slip of a hand turns into what stands there: typing errors put right.

A model that drafts from the left thinks of words that fit, not of words that look like the wrong
one: of "Octoebr" it makes "the". What it can spell is in its vocabulary, so the words that are one
slip away are looked up there, and among the words of the text itself, which may be names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from string import ascii_letters

from unspool.text.tokenizer.tokenizer import Tokenizer

_LETTERS = re.compile(r"[^\W\d_]{3,}")
_MOST = 6  # words that are worth weighing


def respelled(tokenizer: Tokenizer, word: str, text: str) -> list[str]:
    """Known words that are one slip away, swapped letters first, common ones first; none for a
    word that is known itself, and so is spelled right."""
    known = _words(tokenizer)
    if not _LETTERS.fullmatch(word) or word in known:
        return []
    own = {other for other in _LETTERS.findall(text) if other != word and other not in known}
    rank = {**dict.fromkeys(own, 0), **known}
    found = dict.fromkeys(slip for slip in _swapped(word) if slip in rank)
    letters = set(ascii_letters if word.isascii() else filter(str.isalpha, text))
    others = {slip for slip in _slips(word, letters) if slip in rank and slip not in found}
    return [*found, *sorted(others, key=lambda slip: (rank[slip], slip))][:_MOST]


def alike(one: str, other: str) -> bool:
    """Whether a single slip makes one of the other: a letter too many, too few or wrong, or two
    neighbours swapped."""
    short, long = sorted((one, other), key=len)
    at = next((n for n, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(short) < len(long):
        return short[at:] == long[at + 1 :]
    swapped = long[at + 1 : at + 2] + long[at : at + 1] + long[at + 2 :]
    return short[at + 1 :] == long[at + 1 :] or short[at:] == swapped


@lru_cache(maxsize=4)
def _words(tokenizer: Tokenizer) -> dict[str, int]:
    """The vocabulary's words that stand behind a space; the earlier a token was learned, the more
    common it is."""
    found = dict[str, int]()
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token).decode("utf-8", "ignore")
        if piece[:1] == " " and _LETTERS.fullmatch(piece[1:]):
            found.setdefault(piece[1:], token)
    return found


def _swapped(word: str) -> Iterator[str]:
    for n in range(len(word) - 1):
        yield word[:n] + word[n + 1] + word[n] + word[n + 2 :]


def _slips(word: str, letters: set[str]) -> Iterator[str]:
    for n in range(len(word) + 1):
        yield word[:n] + word[n + 1 :]
        for letter in letters:
            yield word[:n] + letter + word[n:]
            yield word[:n] + letter + word[n + 1 :]
