"""Correct typing errors: known words at edit distance one.

A model that drafts from the prefix proposes words that fit, not words that look like the wrong one.
So words at edit distance one are looked up in the model's vocabulary, and among the words of the
text itself, which may be names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from string import ascii_letters

from unspool.text.tokenizer.tokenizer import Tokenizer

_LETTERS = re.compile(r"[^\W\d_]{3,}")
_MAX_CORRECTIONS = 6


def spelling_corrections(tokenizer: Tokenizer, word: str, text: str) -> list[str]:
    """Known words at edit distance one: swapped letters first, then by frequency. Empty for a known
    word."""
    vocabulary = _vocabulary_words(tokenizer)
    if not _LETTERS.fullmatch(word) or word in vocabulary:
        return []
    text_words = {
        other for other in _LETTERS.findall(text) if other != word and other not in vocabulary
    }
    rank = {**dict.fromkeys(text_words, 0), **vocabulary}
    swaps = dict.fromkeys(slip for slip in _swaps(word) if slip in rank)
    letters = set(ascii_letters if word.isascii() else filter(str.isalpha, text))
    others = {slip for slip in _edits(word, letters) if slip in rank and slip not in swaps}
    return [*swaps, *sorted(others, key=lambda slip: (rank[slip], slip))][:_MAX_CORRECTIONS]


def alike(first: str, second: str) -> bool:
    """Whether two words differ by one insertion, deletion, substitution or swap of neighbours."""
    short, long = sorted((first, second), key=len)
    at = next((n for n, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(short) < len(long):
        return short[at:] == long[at + 1 :]
    swapped = long[at + 1 : at + 2] + long[at : at + 1] + long[at + 2 :]
    return short[at + 1 :] == long[at + 1 :] or short[at:] == swapped


@lru_cache(maxsize=4)
def _vocabulary_words(tokenizer: Tokenizer) -> dict[str, int]:
    """Words of the vocabulary that follow a space, with their token id: lower ids are more
    common."""
    words = dict[str, int]()
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token).decode("utf-8", "ignore")
        if piece[:1] == " " and _LETTERS.fullmatch(piece[1:]):
            words.setdefault(piece[1:], token)
    return words


def _swaps(word: str) -> Iterator[str]:
    for n in range(len(word) - 1):
        yield word[:n] + word[n + 1] + word[n] + word[n + 2 :]


def _edits(word: str, letters: set[str]) -> Iterator[str]:
    for n in range(len(word) + 1):
        yield word[:n] + word[n + 1 :]
        for letter in letters:
            yield word[:n] + letter + word[n:]
            yield word[:n] + letter + word[n + 1 :]
