"""Loop detection: a guard against text that repeats itself, and a measure of repetition.

A loop is a run of items each of which equals the item one period before. Two kinds of items are
monitored: token ids, and words (ignoring case, spacing, punctuation and numbering, so that
"1. Foo 2. Foo 3. Foo" is a loop). The last few items of a loop occurred before, one period ago; so
a table of these runs gives the period, and most tokens cost one lookup.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from unspool.errors import SettingsError
from unspool.sampling.watches import MonitoredText, Violation, check_int, shorten

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
