"""Text that repeats itself: the guard that sees it begin, and a measure of how much there is.

A loop is a stretch whose every item equals the one a period before. Two kinds of item are watched:
token ids, and words without regard to case, spacing, punctuation and numbering, so that
"1. Foo 2. Foo 3. Foo" is seen for what it is. The last few items of any loop that is long enough
have occurred before, a period ago; so a table of such runs leads straight to the period, and most
tokens cost one lookup.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from unspool.errors import SettingsError
from unspool.sampling.watches import Trouble, Watched, brief, whole_number

_NUMBER = "#"
_DIGITS = 15  # of a number, the last ones count
_LONGEST_WORD = 64  # a longer run of letters is cut: the unfinished word is kept for every token
_FIRST_IDEOGRAPH = "\u2e80"  # from here on scripts without spaces: a character is a word
_RULE = 4  # a loop without a letter or digit (a rule, a table's border) may be this much longer
_TRIES = 8  # earlier places of a run that are tried as the period


@dataclass(frozen=True)
class LoopGuard:
    """A text that goes round in circles.

    The same items at least `repeats` times in a row, and at least `min_tokens` tokens, or
    `min_words` words, in all. `keep` occurrences stay when the text is rewound. A period of more
    than `longest` items is not looked for. `words=False` watches token ids alone.
    """

    repeats: int = 3
    min_tokens: int = 24
    min_words: int = 16
    keep: int = 1
    longest: int = 256
    words: bool = True
    name: str = "loop"

    def __post_init__(self) -> None:
        for name, least in (
            ("repeats", 2), ("min_tokens", 2), ("min_words", 2), ("keep", 0), ("longest", 1),
        ):  # fmt: skip
            whole_number(f"{name} of loop", getattr(self, name), least)
        if self.keep >= self.repeats:
            raise SettingsError(
                f"keep of loop was {self.keep}; it may be less than repeats ({self.repeats})"
            )

    def start(self) -> LoopWatch:
        return LoopWatch(self)


class Periods:
    """A growing sequence; after each item, whether its end repeats itself."""

    def __init__(self, repeats: int, least: int, longest: int) -> None:
        self._repeats, self._least, self._longest = repeats, least, longest
        # However long the period, at least this many items at the end were copied.
        self._run = min(self._needed(period) for period in range(1, longest + 1))
        self.items: list[Hashable] = []
        self._numbers: dict[int, int] = {}  # where a number stands: which
        self._last: dict[tuple[Hashable, ...], int] = {}  # a run of items: where it ended last
        self._before: list[int] = []  # at each item: where its run ended before that, or -1

    def _needed(self, period: int) -> int:
        """How many items must equal the one a period before."""
        return max((self._repeats - 1) * period, self._least - period)

    def push(self, item: Hashable, number: int | None = None) -> tuple[int, int] | None:
        """Add an item; gives (first item of the loop, period) where there is one."""
        end = len(self.items)
        self.items.append(item)
        if number is not None:
            self._numbers[end] = number
        if end + 1 < self._run:
            self._before.append(-1)
            return None
        run = tuple(self.items[-self._run :])
        place = self._last.get(run, -1)
        self._before.append(place)
        self._last[run] = end
        for _ in range(_TRIES):
            if place < 0 or end - place > self._longest:
                return None
            if self._is_loop(end + 1, end - place):
                return self._first(end + 1, end - place), end - place
            place = self._before[place]
        return None

    def _is_loop(self, end: int, period: int) -> bool:
        first = end - self._needed(period)
        if first < period or self.items[first:end] != self.items[first - period : end - period]:
            return False
        if not self._numbers:
            return True
        unit = self.items[end - period : end]
        # Numbers alone are counting, not looping: the tokens tell if they are all the same.
        return any(item != _NUMBER for item in unit) and all(
            self._counts_on(at, period) for at in range(first, end)
        )

    def _counts_on(self, at: int, period: int) -> bool:
        """Whether a number is that of a period before, or the next one: numbering."""
        if at not in self._numbers:
            return True
        return self._numbers[at] - self._numbers[at - period] in (0, 1)

    def _first(self, end: int, period: int) -> int:
        """Where the loop begins, which may be before what was needed to see it."""
        at = end - self._needed(period)
        while (
            at > period
            and self.items[at - 1] == self.items[at - 1 - period]
            and self._counts_on(at - 1, period)
        ):
            at -= 1
        return at - period

    def same(self, at: int, period: int) -> bool:
        """Whether an item is truly that of a period before, not the next number."""
        return self._numbers.get(at) == self._numbers.get(at - period)

    def rewind(self, length: int) -> None:
        while len(self.items) > length:
            place = self._before.pop()
            if len(self.items) >= self._run:
                run = tuple(self.items[-self._run :])
                if place < 0:
                    del self._last[run]
                else:
                    self._last[run] = place
            self.items.pop()
            self._numbers.pop(len(self.items), None)


class Words:
    """The words of a growing text, as far as they are finished, and the tokens they began in.

    Of the unfinished word a copy is kept for every token, so that any token can be the last again.
    """

    def __init__(self) -> None:
        self.owners: list[int] = []  # of each finished word: the token it began in
        self._partial: list[tuple[str, int]] = []  # after each token: unfinished word, its owner
        self._finished: list[int] = []  # after each token: words finished

    def push(self, part: str, text: Watched) -> list[str]:
        """The words that a token's characters finish."""
        word, owner = self._partial[-1] if self._partial else ("", 0)
        found: list[str] = []
        place = text.length - len(part)
        for offset, character in enumerate(part):
            belongs = character.isalnum()
            if word and not (belongs and _joins(word, character)):
                found.append(word)
                self.owners.append(owner)
                word = ""
            if belongs:
                if not word:
                    owner = text.owner(place + offset)
                word += character
        self._partial.append((word, owner))
        self._finished.append(len(self.owners))
        return found

    def rewind(self, length: int) -> int:
        """Forget tokens; gives how many words remain."""
        del self._partial[length:], self._finished[length:]
        remaining = self._finished[-1] if self._finished else 0
        del self.owners[remaining:]
        return remaining


def _joins(word: str, character: str) -> bool:
    """Whether a letter or digit belongs to the word before it."""
    return (
        _is_digit(word[-1]) == _is_digit(character)
        and character < _FIRST_IDEOGRAPH
        and word[-1] < _FIRST_IDEOGRAPH
        and len(word) < _LONGEST_WORD
    )


def _is_digit(character: str) -> bool:
    return "0" <= character <= "9"


class LoopWatch:
    """One text's tokens and words."""

    def __init__(self, guard: LoopGuard) -> None:
        self._guard = guard
        self._text = Watched()
        self._words = Words()
        self._tokens_seen = Periods(guard.repeats, guard.min_tokens, guard.longest)
        self._words_seen = Periods(guard.repeats, guard.min_words, guard.longest)

    def push(self, token: int, piece: bytes, logprob: float, entropy: float) -> Trouble | None:
        part = self._text.push(token, piece)
        loop = self._tokens_seen.push(token)
        trouble = self._of_tokens(*loop) if loop else None
        if self._guard.words:
            # Every word is told to the finder, whatever was found: its state is the whole text's.
            for word in self._words.push(part, self._text):
                loop = self._push_word(word)
                if loop and trouble is None:
                    trouble = self._of_words(*loop)
        return trouble

    def finish(self) -> Trouble | None:
        return None

    def _push_word(self, word: str) -> tuple[int, int] | None:
        if _is_digit(word[0]):
            return self._words_seen.push(_NUMBER, int(word[-_DIGITS:]))
        return self._words_seen.push(word.casefold())

    def _of_tokens(self, first: int, period: int) -> Trouble | None:
        unit = "".join(self._text.parts[first : first + period])
        total = len(self._text) - first
        wordless = bool(unit) and not any(character.isalnum() for character in unit)
        if wordless and total < _RULE * self._guard.min_tokens:
            return None
        what = brief(unit) if unit else f"a run of {period} tokens"
        reason = f"{what} came {total // period} times in a row"
        return Trouble(self._guard.name, first + self._guard.keep * period, reason)

    def _of_words(self, first: int, period: int) -> Trouble:
        seen, keep = self._words_seen, self._guard.keep
        start = first + keep * period
        # A changed number is not what repeats: the list may go on, with something else in it.
        while keep and not seen.same(start, period):
            start += 1
        unit = " ".join(str(item) for item in seen.items[first : first + period])
        times = (len(seen.items) - first) // period
        reason = f"the words {brief(unit)} came {times} times in a row"
        return Trouble(self._guard.name, self._words.owners[start], reason)

    def rewind(self, length: int) -> None:
        self._text.rewind(length)
        self._tokens_seen.rewind(length)
        if self._guard.words:
            self._words_seen.rewind(self._words.rewind(length))


def repetition_rate(tokens: Sequence[int], n: int = 4) -> float:
    """The share of runs of n tokens that had occurred before: 0 all new, near 1 a loop."""
    seen: set[tuple[int, ...]] = set()
    total = len(tokens) - n + 1
    for at in range(total):
        seen.add(tuple(tokens[at : at + n]))
    return 1 - len(seen) / total if total > 0 else 0.0
