"""How many tokens a search may compute, asked before they are computed: never more than that.

Counted are the prompt (once), every token that is written, also those that are thrown away, and
every token that a judge's model reads. What the engine reads a second time because its memory was
full is the price of that memory, and not counted.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Literal

from unspool.decoding.written import whole
from unspool.errors import UnspoolError

Kind = Literal["prompt", "written", "judged"]


@dataclass(slots=True)
class Spent:
    """Tokens that were computed, and for what."""

    prompt: int = 0  # what of the prompt had not been computed before
    written: int = 0  # kept or thrown away
    judged: int = 0  # by the judge's model

    @property
    def total(self) -> int:
        """All of them."""
        return self.prompt + self.written + self.judged

    def to_dict(self) -> dict[str, int]:
        """For JSON."""
        return {**asdict(self), "total": self.total}


class Budget:
    """Tokens that may be computed, and those that were."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = None if limit is None else whole("budget", limit)
        self.spent = Spent()
        self._known = 0  # tokens of the prompt that were there already

    @property
    def room(self) -> int:
        """How many more may be computed."""
        if self.limit is None:
            return sys.maxsize
        return self.limit - self.spent.total - self._known

    def take(self, kind: Kind, tokens: int) -> None:
        """Ask for tokens that are about to be computed."""
        if tokens > self.room:
            raise UnspoolError(
                f"{tokens} more tokens do not fit the budget of {self.limit}, of which "
                f"{max(0, self.room)} are left; give a larger one"
            )
        setattr(self.spent, kind, getattr(self.spent, kind) + tokens)

    def give_back(self, kind: Kind, tokens: int) -> None:
        """Of those that were asked for, so many were not computed after all."""
        setattr(self.spent, kind, getattr(self.spent, kind) - tokens)

    def found(self, tokens: int) -> None:
        """Of the prompt, so many were in the cache. They are not spent, but their room stays
        taken: what a search does must not depend on who has read its prompt before."""
        self.give_back("prompt", tokens)
        self._known += tokens
