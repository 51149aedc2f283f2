"""Bytes of tokens in, certain text out, as it arrives.

A token may end in the middle of a character, and a stop string may begin in one token and end
three tokens later. A `TextStream` gives out every character as soon as two things are certain: the
character is whole, and it belongs to no stop string. It holds back nothing else.

Which stop string ends the text does not depend on how the bytes were cut into tokens: it is the one
that is complete first, reading character by character. Where two are complete at the same
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
    """An Aho-Corasick automaton: where we are in all stop strings at once, one step a character.

    A state is the longest end of the text so far that begins some stop string; `depth` is its
    length, which is exactly how many characters have to be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]
        self.fallback: list[int] = [0]  # the next shorter end of the text that begins a stop
        self.found: list[str | None] = [None]  # the longest stop string that is complete here
        for stop in _reachable(stops):
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
                self.found.append(None)
            state = following
        self.found[state] = stop

    def _link(self) -> None:
        """Set every fallback, shallow states first, so that a shorter one is known when needed."""
        waiting = deque(self.children[0].values())
        while waiting:
            state = waiting.popleft()
            for character, child in self.children[state].items():
                self.fallback[child] = self.step(self.fallback[state], character)
                waiting.append(child)
            if self.found[state] is None:
                self.found[state] = self.found[self.fallback[state]]

    def step(self, state: int, character: str) -> int:
        """The state after one more character. Amortized constant: each fallback undoes a step."""
        while state and character not in self.children[state]:
            state = self.fallback[state]
        return self.children[state].get(character, 0)

    def longest_open(self, state: int, half: bytes) -> int:
        """How many characters to hold when the next character is known to begin with `half`."""
        while state and not any(
            character == _REPLACEMENT or character.encode().startswith(half)
            for character in self.children[state]
        ):
            state = self.fallback[state]
        return self.depth[state]


class TextStream:
    """Turns the bytes of tokens into text; ends at the first stop string."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stops = _automaton(tuple(_checked(stop))) if stop else None
        self._is_direct = self._stops is None  # whole characters pass as they are
        self._state = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # whole characters that may still turn out to begin a stop string
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stopped

    @property
    def held(self) -> str:
        """The text held back now; the bytes of a half character show as U+FFFD."""
        return self._held + self.half.decode("utf-8", "replace")

    @property
    def half(self) -> bytes:
        """The bytes of a character that is not whole yet."""
        return b"" if self._is_direct else self._decoder.getstate()[0]

    def push(self, piece: bytes) -> str:
        """Take the bytes of one more token; give the text that has become certain."""
        if self._is_direct:
            try:
                return piece.decode()
            except UnicodeDecodeError:
                pass
        if self._stopped is not None:
            return ""
        self._is_direct = False
        text = self._advance(self._decoder.decode(piece))
        self._is_direct = self._stops is None and not self.half
        return text

    def finish(self) -> str:
        """No more bytes will come: give what was held, half characters as U+FFFD."""
        if self._stopped is not None:
            return ""
        ready = self._advance(self._decoder.decode(b"", final=True)) + self._held
        if self._stopped is not None:  # a stop string that itself contains U+FFFD
            return ready
        self._held, self._state = "", 0
        return ready

    def copy(self) -> TextStream:
        """A stream in the same state that goes its own way: for a forked branch."""
        twin = TextStream()
        twin._stops, twin._state = self._stops, self._state
        twin._decoder.setstate(self._decoder.getstate())
        twin._held, twin._stopped, twin._is_direct = self._held, self._stopped, self._is_direct
        return twin

    def _advance(self, fresh: str) -> str:
        stops = self._stops
        if stops is None:
            return fresh
        state = self._state
        if not state and stops.first.isdisjoint(fresh):
            return fresh
        text = self._held + fresh
        for end, character in enumerate(fresh, start=len(self._held) + 1):
            state = stops.step(state, character)
            found = stops.found[state]
            if found is not None:
                self._stopped, self._held = found, ""
                self._decoder.reset()
                return text[: end - len(found)]
        self._state = state
        half = self.half
        hold = stops.longest_open(state, half) if half else stops.depth[state]
        certain = len(text) - hold
        self._held = text[certain:]
        return text[:certain]


@functools.lru_cache(64)
def _automaton(stops: tuple[str, ...]) -> StopStrings:
    """The automaton for some stop strings. It never changes, so all texts share it."""
    return StopStrings(stops)


def _checked(stop: Sequence[str]) -> list[str]:
    stops = [stop] if isinstance(stop, str) else list(stop)
    for each in stops:
        if not isinstance(each, str):
            raise SettingsError(f"stop strings must be text, not {type(each).__name__}")
        if not each:
            raise SettingsError("an empty stop string would stop before the first token: remove it")
        if any("\ud800" <= character <= "\udfff" for character in each):
            raise SettingsError(f"the stop string {each!r} has half a character: it never matches")
    return stops


def _reachable(stops: Sequence[str]) -> list[str]:
    """The stop strings that can be the first to be complete.

    One that has another inside it, before its last character, never is: keeping it would only hold
    text back for nothing.
    """
    distinct = list(dict.fromkeys(stops))
    return [one for one in distinct if not any(other in one[:-1] for other in distinct)]
