"""What happens in a search, as it happens: for whoever watches it, in a terminal or in the page."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Event:
    def to_dict(self) -> dict[str, Any]:
        """For JSON: what happened, and its numbers."""
        told = asdict(self)
        answer = told.get("answer")
        if answer is not None and not isinstance(answer, str | int | float):
            told["answer"] = str(answer)
        return {"event": type(self).__name__.lower(), **told}


@dataclass(frozen=True, slots=True)
class Grown(_Event):
    """A text was continued: a new node below its parent."""

    node: int  # numbered in the order they are made; 0 is the prompt
    parent: int
    text: str  # that it adds to its parent's
    tokens: tuple[int, ...]  # ... as ids
    logprob: float  # of these tokens
    finished: bool  # nothing can follow


@dataclass(frozen=True, slots=True)
class Judged(_Event):
    """A text has a score; None if the judge failed, which `why` then tells."""

    node: int
    score: float | None
    why: str = ""
    answer: Hashable | None = None


@dataclass(frozen=True, slots=True)
class Pruned(_Event):
    """A text is not gone on with; its pages are given back."""

    node: int


@dataclass(frozen=True, slots=True)
class Spending(_Event):
    """How many tokens were computed so far, of how many that may be."""

    prompt: int
    written: int
    judged: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class Won(_Event):
    """The search is over, and this is its best text."""

    node: int
    score: float | None


Event = Grown | Judged | Pruned | Spending | Won
