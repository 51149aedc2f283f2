"""Incremental detokenization: bytes of tokens in, text out, with stop strings.

A token may end in the middle of a character, and a stop string may begin in one token and end
three tokens later. A `TextStream` returns each character as soon as it is complete and cannot be
part of a stop string. It holds back nothing else.

Which stop string ends the text does not depend on how the bytes are split into tokens: it is the
one that is complete first, reading character by character. If two are complete at the same
character, the longer one wins. The text ends where that stop string begins.
"""

from __future__ import annotations

import codecs
import functools
from collections import deque
from collections.abc import Sequence

from unspool.errors import SettingsError

_REPLACEMENT = "\ufffd"


class StopStrings:
    """An Aho-Corasick automaton over all stop strings, one step per character.

    A state is the longest suffix of the text that is a prefix of some stop string; `depth` is its
    length, which is the number of characters to hold back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]
        self.fallback: list[int] = [0]  # the next shorter suffix that is a prefix of a stop string
        self.matches: list[str | None] = [None]  # the longest stop string that is complete here
        for stop in _reachable_stops(stops):
            self._add(stop)
        self._link()
        self.first = frozenset(self.children[0])  # characters that can begin a stop string

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.children[state].get(character)
            if following is None:
                following = len(self.children)
                self.children[state][character] = following
                self.children.append({})
                self.depth.append(self.depth[state] + 1)
                self.fallback.append(0)
                self.matches.append(None)
            state = following
        self.matches[state] = stop

    def _link(self) -> None:
        """Set the fallbacks, in breadth-first order: each depends on shorter ones."""
        waiting = deque(self.children[0].values())
        while waiting:
            state = waiting.popleft()
            for character, child in self.children[state].items():
                self.fallback[child] = self.step(self.fallback[state], character)
                waiting.append(child)
            if self.matches[state] is None:
                self.matches[state] = self.matches[self.fallback[state]]

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character, in amortized constant time."""
        while state and character not in self.children[state]:
            state = self.fallback[state]
        return self.children[state].get(character, 0)

    def longest_open(self, state: int, half: bytes) -> int:
        """Return how many characters to hold back when the next one begins with `half`."""
        while state and not any(
            character == _REPLACEMENT or character.encode().startswith(half)
            for character in self.children[state]
        ):
            state = self.fallback[state]
        return self.depth[state]


class TextStream:
    """Turns the bytes of tokens into text and ends at the first stop string."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stops = _stop_automaton(tuple(_validate_stops(stop))) if stop else None
        self._is_direct = self._stops is None  # complete characters pass unchanged
        self._state = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""  # complete characters that may begin a stop string
        self._stopped: str | None = None

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stopped

    @property
    def pending_text(self) -> str:
        """The text held back now; an incomplete character shows as U+FFFD."""
        return self._pending + self.partial_utf8.decode("utf-8", "replace")

    @property
    def partial_utf8(self) -> bytes:
        """The bytes of an incomplete character."""
        return b"" if self._is_direct else self._decoder.getstate()[0]

    def push(self, piece: bytes) -> str:
        """Add the bytes of one token; return the text that is now certain."""
        if self._is_direct:
            try:
                return piece.decode()
            except UnicodeDecodeError:
                pass
        if self._stopped is not None:
            return ""
        self._is_direct = False
        text = self._advance(self._decoder.decode(piece))
        self._is_direct = self._stops is None and not self.partial_utf8
        return text

    def finish(self) -> str:
        """End the stream; return the text held back, an incomplete character as U+FFFD."""
        if self._stopped is not None:
            return ""
        ready = self._advance(self._decoder.decode(b"", final=True)) + self._pending
        if self._stopped is not None:  # a stop string that itself contains U+FFFD
            return ready
        self._pending, self._state = "", 0
        return ready

    def copy(self) -> TextStream:
        """Return an independent stream in the same state, for a forked branch."""
        copy = TextStream()
        copy._stops, copy._state = self._stops, self._state
        copy._decoder.setstate(self._decoder.getstate())
        copy._pending, copy._stopped = self._pending, self._stopped
        copy._is_direct = self._is_direct
        return copy

    def _advance(self, fresh: str) -> str:
        stops = self._stops
        if stops is None:
            return fresh
        state = self._state
        if not state and stops.first.isdisjoint(fresh):
            return fresh
        text = self._pending + fresh
        for end, character in enumerate(fresh, start=len(self._pending) + 1):
            state = stops.step(state, character)
            match = stops.matches[state]
            if match is not None:
                self._stopped, self._pending = match, ""
                self._decoder.reset()
                return text[: end - len(match)]
        self._state = state
        half = self.partial_utf8
        hold = stops.longest_open(state, half) if half else stops.depth[state]
        certain = len(text) - hold
        self._pending = text[certain:]
        return text[:certain]


@functools.lru_cache(64)
def _stop_automaton(stops: tuple[str, ...]) -> StopStrings:
    """Return the automaton for some stop strings; it is immutable, so all texts share it."""
    return StopStrings(stops)


def _validate_stops(stop: Sequence[str]) -> list[str]:
    stops = [stop] if isinstance(stop, str) else list(stop)
    for text in stops:
        if not isinstance(text, str):
            raise SettingsError(f"stop strings must be text, not {type(text).__name__}")
        if not text:
            raise SettingsError("an empty stop string would stop before the first token: remove it")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise SettingsError(f"the stop string {text!r} has a lone surrogate: it never matches")
    return stops


def _reachable_stops(stops: Sequence[str]) -> list[str]:
    """Return the stop strings that can be complete first.

    One that contains another before its last character never is, and would only hold text back.
    """
    distinct = list(dict.fromkeys(stops))
    return [stop for stop in distinct if not any(other in stop[:-1] for other in distinct)]
