"""Events of a running search, for a terminal or the page."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class _Event:
    event: ClassVar[str]  # name in JSON

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON object with the event's name and fields."""
        fields = asdict(self)
        answer = fields.get("answer")
        if answer is not None and not isinstance(answer, str | int | float):
            fields["answer"] = str(answer)
        return {"event": self.event, **fields}


@dataclass(frozen=True, slots=True)
class NodeAdded(_Event):
    """A new node: a text was continued."""

    event = "grown"
    node: int  # numbered in order of creation; 0 is the prompt
    parent: int
    text: str  # added to the parent's text
    tokens: tuple[int, ...]  # ids of the added tokens
    logprob: float  # sum over the added tokens
    finished: bool  # the text cannot be continued


@dataclass(frozen=True, slots=True)
class NodeScored(_Event):
    """A text was scored; None if the verifier failed, with the reason in `why`."""

    event = "judged"
    node: int
    score: float | None
    why: str = ""
    answer: Hashable | None = None


@dataclass(frozen=True, slots=True)
class NodePruned(_Event):
    """A text was dropped and its pages released."""

    event = "pruned"
    node: int


@dataclass(frozen=True, slots=True)
class BudgetUsed(_Event):
    """Tokens computed so far, and the limit."""

    event = "spending"
    prompt: int
    written: int
    judged: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class SearchFinished(_Event):
    """The search is finished; `node` is its best text."""

    event = "won"
    node: int
    score: float | None


SearchEvent = NodeAdded | NodeScored | NodePruned | BudgetUsed | SearchFinished
