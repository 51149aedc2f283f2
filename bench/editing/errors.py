"""Texts with errors in them that we know of, and what a revision has made of each.

Three kinds of errors: tokens that the editor's own causal model drew (bench/fill.py plants them),
two letters of a word swapped, and a word replaced by another word of the same text. And clean
texts, which have nothing to revise but what was written that way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from fill import planted

KINDS = ("planted", "letters", "words", "clean")
_SHARE = 0.1  # of the words that could be damaged
_LONG, _SHORT = re.compile(r"\b[A-Za-z]{4,}\b"), re.compile(r"\b[A-Za-z]{3,}\b")


@dataclass(frozen=True, slots=True)
class Case:
    """A text as it was written, and as the editor gets it."""

    kind: str
    original: str
    damaged: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a revision did, in words as spaces part them."""

    errors: int
    changed: int  # words that are others now
    touched: int  # errors among them
    restored: int  # errors that are to the letter what stood there
    false: int  # words that were right


def cases(lm: Any, windows: Sequence[Sequence[int]], seed: int) -> Iterator[Case]:
    """Each window with each kind of error, so that any first part of them is balanced."""
    rng = np.random.default_rng(seed)
    for window in windows:
        original = lm.tokenizer.decode(window)
        drawn = planted(lm, window, rng)
        letters, words = swapped_letters(original, rng), swapped_words(original, rng)
        if "\ufffd" in original or drawn is None or original in (letters, words):
            continue
        yield from map(Case, KINDS, [original] * 4, [drawn[0], letters, words, original])


def swapped_letters(text: str, rng: Any) -> str:
    """Typing errors: two neighbours within a word change places."""

    def mistyped(match: re.Match[str]) -> str:
        word = match[0]
        places = [n for n in range(1, len(word) - 1) if word[n] != word[n + 1]]
        if not places or rng.random() >= _SHARE:
            return word
        at = int(rng.choice(places))
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]

    return _LONG.sub(mistyped, text)


def swapped_words(text: str, rng: Any) -> str:
    """Wrong words: any other of the same text, each of which is spelled right."""
    known = list(dict.fromkeys(_SHORT.findall(text)))

    def mistaken(match: re.Match[str]) -> str:
        others = [word for word in known if word.lower() != match[0].lower()]
        return str(rng.choice(others)) if others and rng.random() < _SHARE else match[0]

    return _SHORT.sub(mistaken, text)


def errors(original: str, damaged: str) -> list[tuple[range, list[str]]]:
    """Which words of the damaged text are wrong, and what stood there.

    A drawn token may have parted a word or joined two; such an error is one, whatever its length.
    """
    right, wrong = original.split(), damaged.split()
    found = list[tuple[range, list[str]]]()
    matcher = SequenceMatcher(None, right, wrong, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            continue
        if b - a == d - c:
            found += [(range(c + n, c + n + 1), right[a + n : a + n + 1]) for n in range(d - c)]
        else:
            found.append((range(c, d), right[a:b]))
    return found


def outcome(case: Case, revised: str) -> Outcome:
    """An edit puts a word where a word was and never touches spaces, so words stay in step."""
    before, after = case.damaged.split(), revised.split()
    known = errors(case.original, case.damaged)
    pairs = zip(before, after, strict=True)
    changed = {n for n, (was, now) in enumerate(pairs) if was != now}
    return Outcome(
        errors=len(known),
        changed=len(changed),
        touched=sum(not changed.isdisjoint(place) for place, _ in known),
        restored=sum(after[place.start : place.stop] == right for place, right in known if place),
        false=len(changed.difference(*(place for place, _ in known))),
    )
