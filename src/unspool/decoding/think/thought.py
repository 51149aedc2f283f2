"""The result of `lm.think`: the best text, the search tree and the tokens spent."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from unspool.decoding.search_tree import SearchTree
from unspool.decoding.think.budget import Spent
from unspool.engine.generation import Generation
from unspool.engine.steps import brief
from unspool.notebook import escape_html, note_html, notebook_html


@dataclass(frozen=True, slots=True, repr=False)
class Thought:
    """The best text of a search, with its tree and cost."""

    tree: SearchTree  # pruned nodes included
    policy: str
    budget: int | None  # token limit
    spent: Spent  # tokens computed
    answers: dict[Hashable, float] = field(default_factory=dict)  # weighted votes, highest first
    seconds: float = 0.0

    @property
    def best(self) -> Generation:
        """The best text, as a `Generation`."""
        return self.tree.best

    @property
    def text(self) -> str:
        return self.best.text

    @property
    def score(self) -> float | None:
        """Score of the best text; None if it was not scored."""
        return self.tree.leaf.score

    @property
    def answer(self) -> Hashable | None:
        """Extracted answer of the best text, if the verifier extracts answers."""
        return self.tree.leaf.answer

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        score = "" if self.score is None else f", score {self.score:.4g}"
        return f"<Thought {brief(self.text)}, {self.policy}{score}, {self._price()}>"

    def _price(self) -> str:
        limit = "" if self.budget is None else f" of {self.budget}"
        return f"{self.spent.total}{limit} tokens"

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON object, without the tree."""
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
        tree = (
            f'<details><summary>the search</summary><pre tabindex="0">{escape_html(str(self.tree))}'
        )
        text = f'<div class="text">{escape_html(self.text)}</div>'
        return notebook_html(
            text, note_html(f"{self.policy}, {self._price()}"), f"{tree}</pre></details>"
        )
