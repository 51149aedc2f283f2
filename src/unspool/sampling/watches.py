"""Interfaces of guards and monitors, and the simpler guards.

A `Guard` is an immutable setting. Its `GuardMonitor` follows one text token by token, and reports
what went wrong and where that started. A monitor can be rewound to any earlier length, and is then
in the state of that shorter text: its state is stored per token, and the work per token is bounded.

`BannedGuard` finds words and patterns, `SurpriseGuard` tokens that the model did not expect,
`PredicateGuard` calls a caller's function. `LoopGuard` finds loops. `GuardPolicy` says what to do.
"""

from __future__ import annotations

import codecs
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from unspool.errors import SettingsError, UnspoolError
from unspool.sampling.patterns import LinearPattern, compile_linear, waits_for_more

_MAX_WORD = 1000  # characters
_MAX_TOTAL = 100_000  # characters of all words together
_Decoder = codecs.getincrementaldecoder("utf-8")

Predicate = Callable[[str, Sequence[int]], Any]
"""A caller's function of the text and the tokens so far."""


class GuardError(UnspoolError):
    """A caller's predicate failed: the engine fails that request only."""


@dataclass(frozen=True, slots=True)
class Violation:
    """What went wrong, and the index of the generated token at which it started."""

    guard: str
    start: int
    reason: str


class GuardMonitor(Protocol):
    """Monitors one text."""

    def push(self, token: int, piece: bytes, logprob: float, entropy: float) -> Violation | None:
        """Add a token: its bytes, its log-probability, and the model's entropy (nats)."""

    def finish(self) -> Violation | None:
        """End of text: report violations that only the end makes certain ("cat", not "catalog")."""

    def rewind(self, length: int) -> None:
        """Drop all tokens from index `length` on."""


class Guard(Protocol):
    """A kind of violation to look for."""

    @property
    def name(self) -> str: ...

    def start(self) -> GuardMonitor: ...


class MonitoredText:
    """Tokens and their text: the complete characters, and the token that each started in."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parts: list[str] = []  # characters that each token completed
        self._pending: list[bytes] = []  # after each token: bytes of an incomplete character
        self._started: list[int] = []  # after each token: characters started
        self._complete: list[int] = []  # after each token: complete characters

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Number of complete characters."""
        return self._complete[-1] if self._complete else 0

    def push(self, token: int, piece: bytes) -> str:
        """Add a token; return the characters that it completes."""
        pending = self._pending[-1] if self._pending else b""
        if not pending and piece.isascii():  # the common case needs no decoder
            completed = piece.decode("ascii")
        else:
            decoder = _Decoder("replace")
            decoder.setstate((pending, 0))
            completed = decoder.decode(piece)
            pending = decoder.getstate()[0]
        complete = self.length + len(completed)
        self.tokens.append(token)
        self.parts.append(completed)
        self._pending.append(pending)
        self._complete.append(complete)
        self._started.append(complete + bool(pending))
        return completed

    def rewind(self, length: int) -> None:
        for column in (self.tokens, self.parts, self._pending, self._complete, self._started):
            del column[length:]

    def token_at(self, character: int) -> int:
        """Index of the token that has a character's first byte."""
        return bisect_right(self._started, character)

    def tail(self, characters: int) -> tuple[str, int]:
        """At least the last `characters` characters, cut between tokens, and their start."""
        first = bisect_right(self._complete, max(0, self.length - characters))
        start_char = self._complete[first - 1] if first else 0
        return "".join(self.parts[first:]), start_char


# -- banned words and patterns --------------------------------------------------------------


@dataclass(frozen=True)
class BannedGuard:
    """Banned words, phrases and regular expressions.

    They are found across token borders as soon as they are certain: a whole word once the next
    character shows that it ended. A pattern (RE2 syntax, see `compile_linear`) is searched in the
    last `window` characters before each new token; longer matches are not found.
    """

    words: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    ignore_case: bool = True
    whole_words: bool = True
    window: int = 256
    name: str = "ban"
    _phrases: BannedPhrases = field(init=False, repr=False, compare=False)
    # Each with whether the next character may invalidate a match.
    _searches: tuple[tuple[LinearPattern, bool], ...] = field(
        default=(), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name in ("words", "patterns"):
            value = getattr(self, name)
            strings = (value,) if isinstance(value, str) else tuple(value)
            if not all(isinstance(item, str) and item for item in strings):
                raise SettingsError(f"{name} of a ban must be nonempty strings, got {value!r}")
            object.__setattr__(self, name, strings)
        if not self.words and not self.patterns:
            raise SettingsError("a ban needs words or patterns, such as ban=foo|bar")
        check_int("window", self.window, 1)
        phrases = BannedPhrases(self.words, self.ignore_case, self.whole_words)
        object.__setattr__(self, "_phrases", phrases)
        searches = tuple(
            (compile_linear(pattern, ignore_case=self.ignore_case), waits_for_more(pattern))
            for pattern in self.patterns
        )
        object.__setattr__(self, "_searches", searches)

    @property
    def instructions(self) -> int:
        """Size of the compiled patterns, which bounds the work per token."""
        return sum(pattern.programsize for pattern, _ in self._searches)

    def start(self) -> BannedMonitor:
        return BannedMonitor(self)


class BannedPhrases:
    """Banned words and phrases, looked up by length: the work does not grow with their number."""

    def __init__(self, words: Sequence[str], ignore_case: bool, whole_words: bool) -> None:
        size = sum(map(len, words))
        if any(len(word) > _MAX_WORD for word in words) or size > _MAX_TOTAL:
            raise SettingsError(
                f"the banned words have {size:,} characters, the longest {max(map(len, words)):,}; "
                f"the maximum is {_MAX_TOTAL:,} in total and {_MAX_WORD:,} per word"
            )
        self._ignore_case, self._whole_words = ignore_case, whole_words
        self._words = frozenset(self._fold(word) for word in words)
        self._lengths = sorted({len(word) for word in words}, reverse=True)
        self.longest = max(self._lengths, default=0)

    def find(self, text: str, first: int, ended: bool) -> tuple[int, int] | None:
        """Start and end of the leftmost, then longest phrase that ends at `first` or later.

        A phrase that the next character may still extend is not reported yet.
        """
        folded, best = self._fold(text), None
        for end in range(max(1, first), len(text) + 1):
            for length in self._lengths:
                start = end - length
                if start < 0 or folded[start:end] not in self._words:
                    continue
                if self._whole_words and not self._is_whole(text, start, end, ended):
                    continue
                if best is None or (start, -end) < (best[0], -best[1]):
                    best = start, end
        return best

    def _is_whole(self, text: str, start: int, end: int, ended: bool) -> bool:
        # A border is required only where the phrase ends in a letter: "C++" has one on the left.
        if start and _is_letter(text[start]) and _is_letter(text[start - 1]):
            return False
        if not _is_letter(text[end - 1]):
            return True
        return ended if end == len(text) else not _is_letter(text[end])

    def _fold(self, text: str) -> str:
        """Fold the case without changing the length."""
        if not self._ignore_case:
            return text
        if text.isascii():
            return text.lower()
        return "".join(low if len(low := char.casefold()) == 1 else char for char in text)


def _is_letter(character: str) -> bool:
    return character.isalnum() or character == "_"


class BannedMonitor:
    """Searches the end of the text for banned phrases."""

    def __init__(self, guard: BannedGuard) -> None:
        self._guard = guard
        self._text = MonitoredText()

    def push(self, token: int, piece: bytes, logprob: float, entropy: float) -> Violation | None:
        new_chars = self._text.push(token, piece)
        return self._search(len(new_chars), ended=False) if new_chars else None

    def finish(self) -> Violation | None:
        return self._search(0, ended=True)

    def _search(self, new_chars: int, ended: bool) -> Violation | None:
        matches: list[tuple[int, str]] = []
        guard, searched_until = self._guard, self._text.length - new_chars
        if guard.words:
            # One more character is fetched than searched: the one before a phrase.
            text, start_char = self._text.tail(new_chars + guard._phrases.longest + 1)
            span = guard._phrases.find(text, searched_until - start_char, ended)
            if span is not None:
                matches.append((start_char + span[0], text[span[0] : span[1]]))
        for pattern, may_change in guard._searches:
            text, start_char = self._text.tail(new_chars + guard.window + 1)
            at = max(0, searched_until - start_char - guard.window)
            for match in pattern.finditer(text, at):
                is_undecided = may_change and not ended and match.end() == len(text)
                if match.end() > match.start() and not is_undecided:
                    matches.append((start_char + match.start(), match.group()))
                    break
        if not matches:
            return None
        start, phrase = min(matches, key=lambda match: match[0])
        reason = f"{shorten(phrase)} is banned"
        return Violation(guard.name, self._text.token_at(start), reason)

    def rewind(self, length: int) -> None:
        self._text.rewind(length)


# -- surprise -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SurpriseGuard:
    """Tokens that the model did not expect: one, or several in a row.

    A token's surprisal is -log p in nats. `spike` limits that of a single token, `mean` the average
    of the last `window` tokens; None: no limit. With `beyond_entropy` the entropy is subtracted: a
    rare name is no spike where any name would be rare.
    """

    spike: float | None = 10.0
    mean: float | None = None
    window: int = 16
    beyond_entropy: bool = False
    name: str = "surprise"

    def __post_init__(self) -> None:
        for name in ("spike", "mean"):
            limit = getattr(self, name)
            is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
            if limit is not None and not (is_number and math.isfinite(limit) and limit > 0):
                raise SettingsError(f"{name} of surprise must be > 0 nats, got {limit!r}")
        if self.spike is None and self.mean is None:
            raise SettingsError("a surprise guard needs a spike or a mean, such as surprise=8")
        check_int("window", self.window, 1)

    def start(self) -> SurpriseMonitor:
        return SurpriseMonitor(self)


class SurpriseMonitor:
    """Surprisal of each token so far."""

    def __init__(self, guard: SurpriseGuard) -> None:
        self._guard = guard
        self._surprisals: list[float] = []

    def push(self, token: int, piece: bytes, logprob: float, entropy: float) -> Violation | None:
        guard, surprisals = self._guard, self._surprisals
        surprisals.append(-logprob - (entropy if guard.beyond_entropy else 0.0))
        if guard.spike is not None and surprisals[-1] > guard.spike:
            reason = f"a surprise of {surprisals[-1]:.1f} nats, above {guard.spike:g}"
            return Violation(guard.name, len(surprisals) - 1, reason)
        if guard.mean is not None and len(surprisals) >= guard.window:
            # Not a running sum: it would round differently after a rewind.
            mean = math.fsum(surprisals[-guard.window :]) / guard.window
            if mean > guard.mean:
                reason = f"{guard.window} tokens of {mean:.1f} nats each, above {guard.mean:g}"
                return Violation(guard.name, len(surprisals) - guard.window, reason)
        return None

    def finish(self) -> Violation | None:
        return None

    def rewind(self, length: int) -> None:
        del self._surprisals[length:]


# -- a caller's function --------------------------------------------------------------------


@dataclass(frozen=True)
class PredicateGuard:
    """A caller's function of (text so far, tokens so far), called after every token.

    It returns None or False (no violation), True (the last token is wrong), the index of the first
    wrong token, or a reason as a string. It must be a pure function of its arguments.
    """

    predicate: Predicate
    name: str = "predicate"

    def __post_init__(self) -> None:
        if not callable(self.predicate):
            raise SettingsError(f"a predicate must be callable, got {self.predicate!r}")

    def start(self) -> PredicateMonitor:
        return PredicateMonitor(self)


class PredicateMonitor:
    """Keeps the full text for the function."""

    def __init__(self, guard: PredicateGuard) -> None:
        self._guard = guard
        self._text = MonitoredText()
        self._complete = ""

    def push(self, token: int, piece: bytes, logprob: float, entropy: float) -> Violation | None:
        self._complete += self._text.push(token, piece)
        return self._call()

    def finish(self) -> Violation | None:
        return None

    def _call(self) -> Violation | None:
        name, last = self._guard.name, len(self._text) - 1
        try:
            result = self._guard.predicate(self._complete, tuple(self._text.tokens))
        except Exception as error:
            raise GuardError(f"the guard {name!r} failed at token {last}: {error!r}") from error
        if result is None or result is False:
            return None
        if result is True:
            return Violation(name, last, f"{name} rejected the text")
        if isinstance(result, str):
            return Violation(name, last, result)
        if isinstance(result, int) and 0 <= result <= last:
            return Violation(name, result, f"{name} rejected the text from token {result} on")
        raise GuardError(
            f"the guard {name!r} returned {result!r} at token {last}; it must return None, True, "
            f"False, a reason, or an index from 0 to {last}"
        )

    def rewind(self, length: int) -> None:
        self._text.rewind(length)
        self._complete = self._complete[: self._text.length]


def check_int(name: str, value: object, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise SettingsError(f"{name} must be an integer >= {minimum}, got {value!r}")


def shorten(text: str) -> str:
    """Shorten text for a message, on one line."""
    return repr(text if len(text) <= 40 else text[:37] + "...")
