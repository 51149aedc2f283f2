"""Changes to a text that can be applied and undone in any order.

A change has its position in the current text. Applying or undoing one moves those after it. Changes
that overlap it are blocked until the words that they were meant for are back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unspool.engine.steps import brief
from unspool.errors import SettingsError


@dataclass(slots=True, eq=False, repr=False)
class Change:
    """A replacement of some words."""

    number: int
    start: int  # character offset in the current text
    old: str
    new: str
    probability: float  # of the new words among the candidates, old words included
    gain: float  # increase of the log-probability of the text, in nats
    doubt: float  # how doubtful the old words were
    in_pass: int  # pass that proposed it
    alternatives: tuple[tuple[str, float], ...] = ()  # the candidates, with probabilities
    applied: bool = False
    above: list[Change] = field(default_factory=list)  # overlapping changes made later

    @property
    def text(self) -> str:
        """Words currently at its position."""
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
        fields = {name: getattr(self, name) for name in names}
        return {
            **fields,
            "pass": self.in_pass,
            "alternatives": [list(a) for a in self.alternatives],
        }


class ChangedText:
    """A text and all changes proposed for it."""

    def __init__(self, text: str) -> None:
        self.original = self.text = text
        self.changes: list[Change] = []

    def propose(self, start: int, old: str, new: str, **facts: Any) -> Change:
        """Add a proposed change without applying it. If the same change is already proposed and not
        blocked, it keeps its number and gets the new facts."""
        assert old and new and self.text[start : start + len(old)] == old
        for existing in self.changes:
            is_open = not (existing.applied or existing.above)
            if is_open and (existing.start, existing.old, existing.new) == (start, old, new):
                for name, value in facts.items():
                    setattr(existing, name, value)
                return existing
        change = Change(len(self.changes), start, old, new, **facts)
        self.changes.append(change)
        return change

    def apply(self, number: int) -> None:
        """Apply a change."""
        change = self._change(number)
        if change.applied:
            raise SettingsError(f"change {number} is already applied; undo({number}) reverts it")
        self._check_open(change)
        self._switch(change)

    def undo(self, number: int) -> None:
        """Undo a change."""
        change = self._change(number)
        if not change.applied:
            raise SettingsError(f"change {number} is not applied; apply({number}) applies it")
        self._check_open(change)
        self._switch(change)

    def _change(self, number: int) -> Change:
        if not 0 <= number < len(self.changes):
            count = len(self.changes)
            valid = f"valid are 0 to {count - 1}" if count else "there are none"
            raise SettingsError(f"there is no change {number!r}; {valid}")
        return self.changes[number]

    def _check_open(self, change: Change) -> None:
        if not change.above:
            return
        above = change.above[-1]
        what = f"undo({above.number})" if above.applied else f"apply({above.number})"
        raise SettingsError(
            f"change {change.number} overlaps change {above.number}, which changed its words; "
            f"first: {what}"
        )

    def _switch(self, change: Change) -> None:
        """Swap the words of a change and update the positions of the others."""
        start, end = change.start, change.end
        replacement = change.old if change.applied else change.new
        for other in self.changes:
            if change in other.above:
                other.above.remove(change)
                continue
            first, last = _region(other)
            if other is not change and first < end and start < last:
                other.above.append(change)
            elif first >= end:
                other.start += len(replacement) - (end - start)
        self.text = self.text[:start] + replacement + self.text[end:]
        change.applied = not change.applied


def _region(change: Change) -> tuple[int, int]:
    """Character range of a change's words, or of what overlapping changes made of them."""
    first, last = change.start, change.end
    for above in change.above:
        grown = len(above.new) - len(above.old)
        last += grown if above.applied else -grown
    reaches = [_region(above) for above in change.above]
    return min([first, *(r[0] for r in reaches)]), max([last, *(r[1] for r in reaches)])
