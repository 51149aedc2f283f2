"""Changes to a text, each of which can be made, taken back and made again, in any order.

A change knows where it stands in the text as it is now. Making or taking back one moves those
behind it. One that reaches into the place of another covers it: the one below can be touched again
when the one above it is taken back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from unspool.engine.steps import brief
from unspool.errors import SettingsError


@dataclass(slots=True, eq=False, repr=False)
class Change:
    """Other words in the place of some."""

    number: int
    start: int  # in the text as it is now, in characters
    old: str
    new: str
    probability: float  # of the new words among the candidates, the old ones with them
    gain: float  # by how much they make the text likelier: log-probability, in nats
    doubt: float  # how doubtful the old words were
    in_pass: int  # in which it was proposed
    alternatives: tuple[tuple[str, float], ...] = ()  # the candidates, with probabilities
    applied: bool = False
    above: Change | None = field(default=None, repr=False)  # what covers it

    @property
    def text(self) -> str:
        """What stands in its place now."""
        return self.new if self.applied else self.old

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    def __repr__(self) -> str:
        state = "applied" if self.applied else "proposed"
        words = f"{brief(self.old, 24)} → {brief(self.new, 24)}"
        return f"<Change {self.number}: {words}, {self.probability:.0%}, {state}>"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("number", "start", "old", "new", "probability", "gain", "doubt", "applied")
        told = {name: getattr(self, name) for name in names}
        return {**told, "pass": self.in_pass, "alternatives": [list(a) for a in self.alternatives]}


class ChangedText:
    """A text, and every change that was proposed for it."""

    def __init__(self, text: str) -> None:
        self.original = self.text = text
        self.changes: list[Change] = []

    def propose(self, start: int, old: str, new: str, **facts: Any) -> Change:
        """A change that could be made here; it is not made yet."""
        assert self.text[start : start + len(old)] == old
        change = Change(len(self.changes), start, old, new, **facts)
        self.changes.append(change)
        return change

    def apply(self, number: int) -> None:
        """Make a change."""
        change = self._change(number)
        if change.applied:
            raise SettingsError(f"change {number} is made already; undo({number}) takes it back")
        self._check_open(change)
        self._switch(change)

    def undo(self, number: int) -> None:
        """Take a change back."""
        change = self._change(number)
        if not change.applied:
            raise SettingsError(f"change {number} is not made; apply({number}) makes it")
        self._check_open(change)
        self._switch(change)

    def _change(self, number: int) -> Change:
        if not 0 <= number < len(self.changes):
            count = len(self.changes)
            known = f"they go from 0 to {count - 1}" if count else "there are none"
            raise SettingsError(f"there is no change {number!r}; {known}")
        return self.changes[number]

    def _check_open(self, change: Change) -> None:
        if change.above is not None:
            raise SettingsError(
                f"change {change.number} lies below change {change.above.number}, which was made "
                f"later; take that back first: undo({change.above.number})"
            )

    def _switch(self, change: Change) -> None:
        """Put the other words in the place of those that stand there."""
        start, end = change.start, change.end
        put = change.old if change.applied else change.new
        covered = [] if change.applied else list(self._overlapping(change))
        for other in self.changes:
            top = _top(other)
            if top is not change and top not in covered and top.start >= end:
                other.start += len(put) - (end - start)
        self.text = self.text[:start] + put + self.text[end:]
        change.applied = not change.applied
        for other in self.changes:
            if other.above is change:  # which is taken back
                other.above = None
        for other in covered:
            other.above = change

    def _overlapping(self, change: Change) -> Iterator[Change]:
        """The changes on top that share characters with this one, or its place."""
        for other in self.changes:
            if other is not change and other.above is None:
                apart = other.end <= change.start or other.start >= change.end
                same = other.start == change.start
                if not apart or same:
                    yield other


def _top(change: Change) -> Change:
    while change.above is not None:
        change = change.above
    return change
