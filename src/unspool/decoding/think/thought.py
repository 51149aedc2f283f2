"""What comes of thinking longer: the winner, everything that was looked at, and its price."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from unspool.decoding.search_tree import SearchTree
from unspool.decoding.think.budget import Spent
from unspool.engine.generation import Generation
from unspool.engine.steps import brief
from unspool.notebook import escape, note, picture


@dataclass(frozen=True, slots=True, repr=False)
class Thought:
    """The best text of a search, and how it was found."""

    tree: SearchTree  # all that was looked at, what was pruned too
    policy: str
    budget: int | None  # tokens that might be computed
    spent: Spent  # ... and were
    answers: dict[Hashable, float] = field(default_factory=dict)  # of a vote: most votes first
    seconds: float = 0.0

    @property
    def best(self) -> Generation:
        """The winner, to be kept, rewound or gone on with."""
        return self.tree.best

    @property
    def text(self) -> str:
        """The winner's text."""
        return self.best.text

    @property
    def score(self) -> float | None:
        """What the judge gave the winner; None if nobody was asked."""
        return self.tree.leaf.score

    @property
    def answer(self) -> Hashable | None:
        """What the winner answers, where answers were looked for."""
        return self.tree.leaf.answer

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        score = "" if self.score is None else f", score {self.score:.4g}"
        return f"<Thought {brief(self.text)}, {self.policy}{score}, {self._price()}>"

    def _price(self) -> str:
        of = "" if self.budget is None else f" of {self.budget}"
        return f"{self.spent.total}{of} tokens"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: everything but the tree."""
        return {
            **self.best.to_dict(),
            "policy": self.policy,
            "score": self.score,
            "budget": self.budget,
            "spent": self.spent.to_dict(),
            "answers": {str(answer): votes for answer, votes in self.answers.items()},
            "seconds": self.seconds,
        }

    def _repr_html_(self) -> str:
        tree = f'<details><summary>the search</summary><pre tabindex="0">{escape(str(self.tree))}'
        said = f'<div class="text">{escape(self.text)}</div>'
        return picture(said, note(f"{self.policy}, {self._price()}"), f"{tree}</pre></details>")
