"""Guards at work: they follow a text token by token and say when to rewind."""

from __future__ import annotations

import codecs
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from unspool.errors import SettingsError, UnspoolError

# -- Regular expressions from a caller, matched in linear time on the engine thread
#
# Python's `re` backtracks and cannot be interrupted, so one pattern could block every request. RE2
# reads each character once for any pattern; its memory and program size are bounded here.
#
# The syntax is RE2's: https://github.com/google/re2/wiki/Syntax. It differs from Python's `re`: no
# look-around, back references, atomic groups or possessive repeats; `\d`, `\w`, `\s` and `` are
# ASCII only (`\pL` is a letter of any script); `$` without `(?m)` and `\z` mean the end of the
# text.

MAX_INSTRUCTIONS = 8192  # of all patterns of a sequence: a few milliseconds per token
_MAX_PATTERN_LENGTH = 1000  # characters in a pattern
_MAX_PATTERN_BYTES = 1 << 19  # bytes for a pattern's program and its automaton


class PatternMatch(Protocol):
    """The part of RE2's match that is used here."""

    def start(self) -> int: ...

    def end(self) -> int: ...

    def group(self) -> str: ...


class LinearPattern(Protocol):
    """A compiled pattern. Safe to use from several threads."""

    @property
    def programsize(self) -> int:
        """Instructions of the compiled program."""

    def match(self, text: str) -> PatternMatch | None: ...

    def finditer(self, text: str, pos: int) -> Iterator[PatternMatch]: ...


def compile_linear(pattern: str, *, ignore_case: bool = False) -> LinearPattern:
    """Compile a pattern in RE2's syntax.

    Raises:
        SettingsError: It is invalid, not supported, too large, or matches the empty string.
    """
    import re2  # only needed for patterns

    short_pattern = repr(pattern if len(pattern) <= 60 else pattern[:57] + "...")
    if len(pattern) > _MAX_PATTERN_LENGTH:
        raise SettingsError(
            f"the pattern {short_pattern} has {len(pattern):,} characters; the maximum is "
            f"{_MAX_PATTERN_LENGTH:,}"
        )
    if not pattern.isascii() and re.search(r"\\[bB]", pattern):
        raise SettingsError(
            f"the pattern {short_pattern} uses \\b with non-ASCII letters, which it does not match;"
            r" use [^\pL] or $ instead"
        )
    options = re2.Options()
    options.max_mem, options.case_sensitive, options.log_errors = (
        _MAX_PATTERN_BYTES,
        not ignore_case,
        False,
    )
    try:
        compiled: LinearPattern = re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        raise SettingsError(
            f"the pattern {short_pattern} is not a valid regular expression: {_reason(error)}"
        ) from error
    finally:
        re2.purge()  # its cache would hold 128 patterns
    if compiled.match("") is not None:
        raise SettingsError(
            f"the pattern {short_pattern} matches the empty string, so it would ban everything"
        )
    check_size(compiled.programsize)
    return compiled


def check_size(instructions: int) -> None:
    """Raise if the patterns would take too long per token."""
    if instructions > MAX_INSTRUCTIONS:
        raise SettingsError(
            f"the patterns compile to {instructions:,} instructions; the maximum is "
            f"{MAX_INSTRUCTIONS:,}: use fewer patterns or smaller repeats"
        )


def waits_for_more(pattern: str) -> bool:
    r"""Whether the next character may invalidate a match at the end of the text (\b, \z, $)."""
    return re.search(r"\\[bBz]|\$", pattern) is not None


def _reason(error: Exception) -> str:
    """RE2's message, with a hint for unsupported syntax."""
    if isinstance(error, UnicodeEncodeError):
        return "it contains a lone surrogate"
    message = error.args[0] if error.args else b""
    text = message.decode("utf-8", "replace") if isinstance(message, bytes) else str(message)
    if "too large" in text:
        return "it is too large; use smaller repeats"
    if text.endswith("\\Z"):
        return f"{text}; write \\z for the end of the text"
    if "perl operator" in text or "escape sequence" in text or "repetition operator" in text:
        return (
            f"{text}; look-around, back references, atomic groups and possessive repeats are not "
            "supported (RE2 syntax)"
        )
    return text


# -- Interfaces of guards and monitors, and the simpler guards

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


# -- Loop detection: a guard against text that repeats itself, and a measure of repetition

_NUMBER_ITEM = "#"
_MAX_DIGITS = 15  # only the last digits of a number are compared
_MAX_LOOP_WORD = 64  # longer words are split: an unfinished word is stored for every token
_FIRST_IDEOGRAPH = "\u2e80"  # scripts without spaces start here: each character is a word
_WORDLESS_FACTOR = 4  # loops without letters or digits (rules, table borders) may be longer
_MAX_PERIODS = 8  # earlier occurrences of a run that are tried


@dataclass(frozen=True)
class LoopGuard:
    """Text that loops.

    The same items at least `repeats` times in a row, and at least `min_tokens` tokens or
    `min_words` words in total. `keep` occurrences stay when the text is rewound. Periods of more
    than `longest` items are not searched. `words=False` compares token ids only.
    """

    repeats: int = 3
    min_tokens: int = 24
    min_words: int = 16
    keep: int = 1
    longest: int = 256
    words: bool = True
    name: str = "loop"

    def __post_init__(self) -> None:
        for name, minimum in (
            ("repeats", 2), ("min_tokens", 2), ("min_words", 2), ("keep", 0), ("longest", 1),
        ):  # fmt: skip
            check_int(f"{name} of loop", getattr(self, name), minimum)
        if self.keep >= self.repeats:
            raise SettingsError(
                f"keep of loop must be less than repeats ({self.repeats}), got {self.keep}"
            )

    def start(self) -> LoopMonitor:
        return LoopMonitor(self)


class LoopFinder:
    """A growing sequence of items; detects after each item whether the end is a loop."""

    def __init__(self, repeats: int, min_items: int, longest: int) -> None:
        self._repeats, self._min_items, self._max_period = repeats, min_items, longest
        # For any period, at least this many items at the end are repeated.
        self._run_length = min(self._needed(period) for period in range(1, longest + 1))
        self.items: list[Hashable] = []
        self._numbers_at: dict[int, int] = {}  # index of an item: its number
        self._last_end: dict[
            tuple[Hashable, ...], int
        ] = {}  # a run of items: index where it ended last
        self._previous_end: list[int] = []  # for each item: where its run ended before, or -1

    def _needed(self, period: int) -> int:
        """Number of items that must equal the item one period before."""
        return max((self._repeats - 1) * period, self._min_items - period)

    def push(self, item: Hashable, number: int | None = None) -> tuple[int, int] | None:
        """Add an item; return (first item of the loop, period) if there is one."""
        end = len(self.items)
        self.items.append(item)
        if number is not None:
            self._numbers_at[end] = number
        if end + 1 < self._run_length:
            self._previous_end.append(-1)
            return None
        run = tuple(self.items[-self._run_length :])
        previous = self._last_end.get(run, -1)
        self._previous_end.append(previous)
        self._last_end[run] = end
        for _ in range(_MAX_PERIODS):
            if previous < 0 or end - previous > self._max_period:
                return None
            if self._is_loop(end + 1, end - previous):
                return self._first(end + 1, end - previous), end - previous
            previous = self._previous_end[previous]
        return None

    def _is_loop(self, end: int, period: int) -> bool:
        first = end - self._needed(period)
        if first < period or self.items[first:end] != self.items[first - period : end - period]:
            return False
        if not self._numbers_at:
            return True
        unit = self.items[end - period : end]
        # Numbers only are counting, not a loop; equal numbers are found by the tokens.
        return any(item != _NUMBER_ITEM for item in unit) and all(
            self._is_numbering(at, period) for at in range(first, end)
        )

    def _is_numbering(self, at: int, period: int) -> bool:
        """Whether a number equals that of the previous period or follows it: numbering."""
        if at not in self._numbers_at:
            return True
        return self._numbers_at[at] - self._numbers_at[at - period] in (0, 1)

    def _first(self, end: int, period: int) -> int:
        """First item of the loop, which may be before the items needed to detect it."""
        at = end - self._needed(period)
        while (
            at > period
            and self.items[at - 1] == self.items[at - 1 - period]
            and self._is_numbering(at - 1, period)
        ):
            at -= 1
        return at - period

    def equals_previous(self, at: int, period: int) -> bool:
        """Whether an item equals that of the previous period, numbers included."""
        return self._numbers_at.get(at) == self._numbers_at.get(at - period)

    def rewind(self, length: int) -> None:
        while len(self.items) > length:
            previous = self._previous_end.pop()
            if len(self.items) >= self._run_length:
                run = tuple(self.items[-self._run_length :])
                if previous < 0:
                    del self._last_end[run]
                else:
                    self._last_end[run] = previous
            self.items.pop()
            self._numbers_at.pop(len(self.items), None)


class FinishedWords:
    """Finished words of a growing text, and the tokens in which they started.

    The unfinished word is stored for every token, so that the text can be rewound to any token.
    """

    def __init__(self) -> None:
        self.first_tokens: list[int] = []  # token in which each finished word started
        self._partial: list[
            tuple[str, int]
        ] = []  # after each token: unfinished word, its first token
        self._finished: list[int] = []  # after each token: number of finished words

    def push(self, part: str, text: MonitoredText) -> list[str]:
        """Add a token's characters; return the words that they finish."""
        word, first_token = self._partial[-1] if self._partial else ("", 0)
        words: list[str] = []
        previous = text.length - len(part)
        for offset, character in enumerate(part):
            is_word_char = character.isalnum()
            if word and not (is_word_char and _continues(word, character)):
                words.append(word)
                self.first_tokens.append(first_token)
                word = ""
            if is_word_char:
                if not word:
                    first_token = text.token_at(previous + offset)
                word += character
        self._partial.append((word, first_token))
        self._finished.append(len(self.first_tokens))
        return words

    def rewind(self, length: int) -> int:
        """Drop tokens; return the number of remaining words."""
        del self._partial[length:], self._finished[length:]
        remaining = self._finished[-1] if self._finished else 0
        del self.first_tokens[remaining:]
        return remaining


def _continues(word: str, character: str) -> bool:
    """Whether a letter or digit continues the word before it."""
    return (
        _is_digit(word[-1]) == _is_digit(character)
        and character < _FIRST_IDEOGRAPH
        and word[-1] < _FIRST_IDEOGRAPH
        and len(word) < _MAX_LOOP_WORD
    )


def _is_digit(character: str) -> bool:
    return "0" <= character <= "9"


class LoopMonitor:
    """Detects loops of tokens and of words in one text."""

    def __init__(self, guard: LoopGuard) -> None:
        self._guard = guard
        self._text = MonitoredText()
        self._words = FinishedWords()
        self._token_loops = LoopFinder(guard.repeats, guard.min_tokens, guard.longest)
        self._word_loops = LoopFinder(guard.repeats, guard.min_words, guard.longest)

    def push(self, token: int, piece: bytes, logprob: float, entropy: float) -> Violation | None:
        part = self._text.push(token, piece)
        loop = self._token_loops.push(token)
        violation = self._token_violation(*loop) if loop else None
        if self._guard.words:
            # Every word is pushed even after a loop was found: the state must cover the text.
            for word in self._words.push(part, self._text):
                loop = self._push_word(word)
                if loop and violation is None:
                    violation = self._word_violation(*loop)
        return violation

    def finish(self) -> Violation | None:
        return None

    def _push_word(self, word: str) -> tuple[int, int] | None:
        if _is_digit(word[0]):
            return self._word_loops.push(_NUMBER_ITEM, int(word[-_MAX_DIGITS:]))
        return self._word_loops.push(word.casefold())

    def _token_violation(self, first: int, period: int) -> Violation | None:
        unit = "".join(self._text.parts[first : first + period])
        total = len(self._text) - first
        is_wordless = bool(unit) and not any(character.isalnum() for character in unit)
        if is_wordless and total < _WORDLESS_FACTOR * self._guard.min_tokens:
            return None
        repeated = shorten(unit) if unit else f"a run of {period} tokens"
        reason = f"{repeated} came {total // period} times in a row"
        return Violation(self._guard.name, first + self._guard.keep * period, reason)

    def _word_violation(self, first: int, period: int) -> Violation:
        periods, keep = self._word_loops, self._guard.keep
        start = first + keep * period
        # Do not start at a changed number: the list may continue with other items.
        while keep and not periods.equals_previous(start, period):
            start += 1
        unit = " ".join(str(item) for item in periods.items[first : first + period])
        count = (len(periods.items) - first) // period
        reason = f"the words {shorten(unit)} came {count} times in a row"
        return Violation(self._guard.name, self._words.first_tokens[start], reason)

    def rewind(self, length: int) -> None:
        self._text.rewind(length)
        self._token_loops.rewind(length)
        if self._guard.words:
            self._word_loops.rewind(self._words.rewind(length))


def repetition_rate(tokens: Sequence[int], n: int = 4) -> float:
    """Fraction of n-grams that occurred before: 0 all new, near 1 a loop."""
    total = len(tokens) - n + 1
    distinct = {tuple(tokens[at : at + n]) for at in range(total)}
    return 1 - len(distinct) / total if total > 0 else 0.0
