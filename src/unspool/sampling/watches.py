"""What watching a text is: guards, their watches, the trouble they find; and the simpler guards.

A `Guard` is a setting, shared and never changed. Its `Watch` follows one text, is told each new
token, and says when something is wrong and where it began. A watch can be taken back to any earlier
length, and is then in every respect the watch of that shorter text: all that it keeps is kept per
token, and nothing is looked at twice without a bound.

`BannedGuard` finds words and patterns, `SurpriseGuard` what the model itself did not expect,
`PredicateGuard` what a caller's function finds. Loops are in `loops.py`; what is done about trouble
is in `guards.py`.
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

_LONGEST_WORD = 1000  # characters
_MOST_WORDS = 100_000  # characters of all together
_Decoder = codecs.getincrementaldecoder("utf-8")

Judge = Callable[[str, Sequence[int]], Any]
"""A caller's function of the text and the tokens so far."""


class GuardError(UnspoolError):
    """A caller's own predicate failed: an engine ends that request, and no other."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What went wrong, and at which of the generated tokens it began: the one to forbid there."""

    guard: str
    start: int
    reason: str


class Watch(Protocol):
    """One text being watched."""

    def push(self, token: int, piece: bytes, logprob: float, entropy: float) -> Trouble | None:
        """The next token: its bytes, its log-probability, and how unsure the model was (nats)."""

    def finish(self) -> Trouble | None:
        """Nothing follows: trouble that only the end makes certain ("cat" was no "catalog")."""

    def rewind(self, length: int) -> None:
        """Forget every token from index `length` on."""


class Guard(Protocol):
    """What to look for."""

    @property
    def name(self) -> str: ...

    def start(self) -> Watch: ...


class Watched:
    """Tokens and their text: which characters are whole by now, and which token began each."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parts: list[str] = []  # the characters that each token made whole
        self._pending: list[bytes] = []  # after each token: bytes of an unfinished character
        self._reach: list[int] = []  # after each token: characters begun
        self._whole: list[int] = []  # after each token: characters whole

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """How many whole characters there are."""
        return self._whole[-1] if self._whole else 0

    def push(self, token: int, piece: bytes) -> str:
        """Add a token; gives the characters that are whole with it."""
        pending = self._pending[-1] if self._pending else b""
        if not pending and piece.isascii():  # nearly always: spares a decoder
            part = piece.decode("ascii")
        else:
            decoder = _Decoder("replace")
            decoder.setstate((pending, 0))
            part = decoder.decode(piece)
            pending = decoder.getstate()[0]
        whole = self.length + len(part)
        self.tokens.append(token)
        self.parts.append(part)
        self._pending.append(pending)
        self._whole.append(whole)
        self._reach.append(whole + bool(pending))
        return part

    def rewind(self, length: int) -> None:
        for column in (self.tokens, self.parts, self._pending, self._whole, self._reach):
            del column[length:]

    def owner(self, character: int) -> int:
        """The token that holds a character's first byte."""
        return bisect_right(self._reach, character)

    def tail(self, characters: int) -> tuple[str, int]:
        """At least that many of the last characters, cut between tokens; where they begin."""
        first = bisect_right(self._whole, max(0, self.length - characters))
        begin = self._whole[first - 1] if first else 0
        return "".join(self.parts[first:]), begin


# -- banned words and patterns --------------------------------------------------------------


@dataclass(frozen=True)
class BannedGuard:
    """Words, phrases and regular expressions that may not be written.

    They are found across the borders of tokens, as soon as they are certain: a whole word when
    what follows it shows that it has ended. A pattern (RE2 syntax, see `patterns.py`) is searched
    for in the last `window` characters before each new piece; a longer match is not seen.
    """

    words: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    ignore_case: bool = True
    whole_words: bool = True
    window: int = 256
    name: str = "ban"
    _phrases: _Phrases = field(init=False, repr=False, compare=False)
    # Each with whether the next character may undo a match.
    _searches: tuple[tuple[LinearPattern, bool], ...] = field(
        default=(), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name in ("words", "patterns"):
            given = getattr(self, name)
            strings = (given,) if isinstance(given, str) else tuple(given)
            if not all(isinstance(item, str) and item for item in strings):
                raise SettingsError(f"{name} of a ban held {given!r}; it may hold texts, not empty")
            object.__setattr__(self, name, strings)
        if not self.words and not self.patterns:
            raise SettingsError("a ban needs words or patterns, such as ban=foo|bar")
        whole_number("window", self.window, 1)
        phrases = _Phrases(self.words, self.ignore_case, self.whole_words)
        object.__setattr__(self, "_phrases", phrases)
        searches = tuple(
            (compile_linear(pattern, ignore_case=self.ignore_case), waits_for_more(pattern))
            for pattern in self.patterns
        )
        object.__setattr__(self, "_searches", searches)

    @property
    def instructions(self) -> int:
        """The size of the compiled patterns, which bounds their work on a token."""
        return sum(pattern.programsize for pattern, _ in self._searches)

    def start(self) -> BannedWatch:
        return BannedWatch(self)


class _Phrases:
    """Banned words and phrases, looked up by their lengths: the work on a character does not grow
    with how many there are."""

    def __init__(self, words: Sequence[str], ignore_case: bool, whole_words: bool) -> None:
        size = sum(map(len, words))
        if any(len(word) > _LONGEST_WORD for word in words) or size > _MOST_WORDS:
            raise SettingsError(
                f"the banned words have {size:,} characters, the longest {max(map(len, words)):,}; "
                f"at most {_MOST_WORDS:,} are allowed, and {_LONGEST_WORD:,} in one of them"
            )
        self._ignore_case, self._whole_words = ignore_case, whole_words
        self._words = frozenset(self._fold(word) for word in words)
        self._lengths = sorted({len(word) for word in words}, reverse=True)
        self.longest = max(self._lengths, default=0)

    def find(self, text: str, first: int, ended: bool) -> tuple[int, int] | None:
        """The leftmost phrase that ends at `first` or behind it, and of these the longest: where
        it starts and ends. One whose end the next character may undo is not found yet."""
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
        # A border is only asked for where the phrase itself ends in a letter: "C++" has one side.
        if start and _is_letter(text[start]) and _is_letter(text[start - 1]):
            return False
        if not _is_letter(text[end - 1]):
            return True
        return ended if end == len(text) else not _is_letter(text[end])

    def _fold(self, text: str) -> str:
        """The text as it is compared: of the same length, whatever the case."""
        if not self._ignore_case:
            return text
        if text.isascii():
            return text.lower()
        return "".join(low if len(low := one.casefold()) == 1 else one for one in text)


def _is_letter(character: str) -> bool:
    return character.isalnum() or character == "_"


class BannedWatch:
    """The text so far, searched at its end."""

    def __init__(self, guard: BannedGuard) -> None:
        self._guard = guard
        self._text = Watched()

    def push(self, token: int, piece: bytes, logprob: float, entropy: float) -> Trouble | None:
        fresh = self._text.push(token, piece)
        return self._search(len(fresh), ended=False) if fresh else None

    def finish(self) -> Trouble | None:
        return self._search(0, ended=True)

    def _search(self, fresh: int, ended: bool) -> Trouble | None:
        matches: list[tuple[int, str]] = []
        guard, known = self._guard, self._text.length - fresh
        if guard.words:
            # One more character is fetched than searched, to see what stands before.
            text, begin = self._text.tail(fresh + guard._phrases.longest + 1)
            place = guard._phrases.find(text, known - begin, ended)
            if place is not None:
                matches.append((begin + place[0], text[place[0] : place[1]]))
        for pattern, waits in guard._searches:
            text, begin = self._text.tail(fresh + guard.window + 1)
            at = max(0, known - begin - guard.window)
            for match in pattern.finditer(text, at):
                undecided = waits and not ended and match.end() == len(text)
                if match.end() > match.start() and not undecided:
                    matches.append((begin + match.start(), match.group()))
                    break
        if not matches:
            return None
        start, banned = min(matches, key=lambda match: match[0])
        reason = f"{brief(banned)} is banned"
        return Trouble(guard.name, self._text.owner(start), reason)

    def rewind(self, length: int) -> None:
        self._text.rewind(length)


# -- surprise -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SurpriseGuard:
    """What the model itself did not expect: one token, or a stretch of them.

    A token's surprise is -log p in nats. `spike` bounds that of a single token, `mean` that of
    the last `window` tokens on average; None leaves one out. With `beyond_entropy` the surprise
    that was to be expected is taken off: a rare name is no spike where any name would be rare.
    """

    spike: float | None = 10.0
    mean: float | None = None
    window: int = 16
    beyond_entropy: bool = False
    name: str = "surprise"

    def __post_init__(self) -> None:
        for name in ("spike", "mean"):
            level = getattr(self, name)
            number = isinstance(level, int | float) and not isinstance(level, bool)
            if level is not None and not (number and math.isfinite(level) and level > 0):
                raise SettingsError(f"{name} of surprise was {level!r}; it may be nats, above 0")
        if self.spike is None and self.mean is None:
            raise SettingsError("a surprise guard needs a spike or a mean, such as surprise=8")
        whole_number("window", self.window, 1)

    def start(self) -> SurpriseWatch:
        return SurpriseWatch(self)


class SurpriseWatch:
    """The surprise of each token so far."""

    def __init__(self, guard: SurpriseGuard) -> None:
        self._guard = guard
        self._surprises: list[float] = []

    def push(self, token: int, piece: bytes, logprob: float, entropy: float) -> Trouble | None:
        guard, past = self._guard, self._surprises
        past.append(-logprob - (entropy if guard.beyond_entropy else 0.0))
        if guard.spike is not None and past[-1] > guard.spike:
            reason = f"a surprise of {past[-1]:.1f} nats, above {guard.spike:g}"
            return Trouble(guard.name, len(past) - 1, reason)
        if guard.mean is not None and len(past) >= guard.window:
            # Summed anew: a running sum would round differently after a rewind.
            mean = math.fsum(past[-guard.window :]) / guard.window
            if mean > guard.mean:
                reason = f"{guard.window} tokens of {mean:.1f} nats each, above {guard.mean:g}"
                return Trouble(guard.name, len(past) - guard.window, reason)
        return None

    def finish(self) -> Trouble | None:
        return None

    def rewind(self, length: int) -> None:
        del self._surprises[length:]


# -- a caller's own function ----------------------------------------------------------------


@dataclass(frozen=True)
class PredicateGuard:
    """A caller's function of (text so far, tokens so far), asked after every token.

    It answers None or False (all is well), True (the last token is wrong), the index of the token
    at which it went wrong, or a reason in words. It must depend on nothing but what it is given.
    """

    judge: Judge
    name: str = "predicate"

    def __post_init__(self) -> None:
        if not callable(self.judge):
            raise SettingsError(f"a predicate was {self.judge!r}; it may be a function")

    def start(self) -> PredicateWatch:
        return PredicateWatch(self)


class PredicateWatch:
    """The whole text, as the function wants it."""

    def __init__(self, guard: PredicateGuard) -> None:
        self._guard = guard
        self._text = Watched()
        self._whole = ""

    def push(self, token: int, piece: bytes, logprob: float, entropy: float) -> Trouble | None:
        self._whole += self._text.push(token, piece)
        return self._ask()

    def finish(self) -> Trouble | None:
        return None

    def _ask(self) -> Trouble | None:
        name, last = self._guard.name, len(self._text) - 1
        try:
            answer = self._guard.judge(self._whole, tuple(self._text.tokens))
        except Exception as error:
            raise GuardError(f"the guard {name!r} failed at token {last}: {error!r}") from error
        if answer is None or answer is False:
            return None
        if answer is True:
            return Trouble(name, last, f"{name} refused the text")
        if isinstance(answer, str):
            return Trouble(name, last, answer)
        if isinstance(answer, int) and 0 <= answer <= last:
            return Trouble(name, answer, f"{name} refused the text from token {answer}")
        raise GuardError(
            f"the guard {name!r} answered {answer!r} at token {last}; it may answer None, True, "
            f"False, a reason, or an index from 0 to {last}"
        )

    def rewind(self, length: int) -> None:
        self._text.rewind(length)
        self._whole = self._whole[: self._text.length]


def whole_number(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingsError(f"{name} was {value!r}; it may be a whole number of {least} or more")


def brief(text: str) -> str:
    """A piece of text for a reason: on one line, and not long."""
    return repr(text if len(text) <= 40 else text[:37] + "...")
