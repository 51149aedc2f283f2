"""Changes to a text, each of which can be made, taken back and made again, in any order.

A change knows where it stands in the text as it is now. Making or taking back one moves those
behind it. Those that reach into its place were meant for the words that stood there: they can be
touched again when these are back.
"""

from __future__ import annotations

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
    above: list[Change] = field(default_factory=list)  # what has put other words there

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
        """A change that could be made here, words for words; it is not made yet. One that was
        proposed before, and is still open, keeps its number and gets the new facts."""
        assert old and new and self.text[start : start + len(old)] == old
        for known in self.changes:
            is_open = not (known.applied or known.above)
            if is_open and (known.start, known.old, known.new) == (start, old, new):
                for name, value in facts.items():
                    setattr(known, name, value)
                return known
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
        if not change.above:
            return
        above = change.above[-1]
        what = f"undo({above.number})" if above.applied else f"apply({above.number})"
        raise SettingsError(
            f"change {change.number} was meant for other words than those that change "
            f"{above.number} has left there; first: {what}"
        )

    def _switch(self, change: Change) -> None:
        """Put the other words in the place of those that stand there."""
        start, end = change.start, change.end
        put = change.old if change.applied else change.new
        for other in self.changes:
            if change in other.above:
                other.above.remove(change)
                continue
            first, last = _region(other)
            if other is not change and first < end and start < last:
                other.above.append(change)
            elif first >= end:
                other.start += len(put) - (end - start)
        self.text = self.text[:start] + put + self.text[end:]
        change.applied = not change.applied


def _region(change: Change) -> tuple[int, int]:
    """Where a change's words stand, or those that others have put in their place."""
    first, last = change.start, change.end
    for above in change.above:
        grown = len(above.new) - len(above.old)
        last += grown if above.applied else -grown
    reaches = [_region(above) for above in change.above]
    return min([first, *(r[0] for r in reaches)]), max([last, *(r[1] for r in reaches)])
