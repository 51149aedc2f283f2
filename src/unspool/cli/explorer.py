"""What the keys of `unspool explore` do: a text with a cursor, and the branches that were left.

Knows nothing of screens or keys, which are in `explore_view.py` and `explore.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unspool.engine.generation import Generation
    from unspool.engine.results import Candidate
    from unspool.lm import LanguageModel

SHOWN = 10


@dataclass(slots=True)
class Explorer:
    """A text with a cursor, and the branches that were left on the way."""

    lm: LanguageModel
    branches: list[Generation]
    at: int = 0  # which branch
    cursor: int = 0  # behind how many of its tokens we stand
    chosen: int = 0  # which candidate is marked
    message: str = ""
    _candidates: dict[tuple[int, ...], tuple[Candidate, ...]] = field(default_factory=dict)

    @property
    def text(self) -> Generation:
        return self.branches[self.at]

    def candidates(self) -> tuple[Candidate, ...]:
        """The likeliest tokens where the cursor stands."""
        past = (*self.text.prompt, *self.text.tokens[: self.cursor])
        if past not in self._candidates:
            self._candidates[past] = self.lm.choices(past, SHOWN)
        return self._candidates[past]

    # -- what the keys do ----------------------------------------------------------------------

    def forward(self) -> None:
        """The next token: the one that was written, or a newly picked one."""
        if self.cursor == len(self.text.steps):
            self.branches[self.at] = self.text.resume(max_tokens=1)
        self._move(min(self.cursor + 1, len(self.text.steps)))

    def back(self) -> None:
        self._move(max(0, self.cursor - 1))

    def mark(self, step: int) -> None:
        self.chosen = (self.chosen + step) % max(1, len(self.candidates()))

    def take(self) -> None:
        """Put the marked candidate here; what stood behind stays as a branch."""
        self._put(self.candidates()[self.chosen].token)

    def type(self, words: str) -> None:
        """Put words of one's own here."""
        if words:
            self._put(words)

    def run(self, tokens: int = 20) -> None:
        """Write on for a while."""
        self._leave()
        self.branches[self.at] = self.text.resume(max_tokens=tokens)
        self._move(len(self.text.steps))

    def fork(self) -> None:
        """A copy of this text up to the cursor, to go another way with."""
        self.branches.append(self.text.rewind(self.cursor))
        self.at = len(self.branches) - 1
        self.message = f"branch {self.at + 1} begins here"

    def next_branch(self) -> None:
        self.at = (self.at + 1) % len(self.branches)
        self._move(len(self.text.steps))

    def _put(self, token: int | str) -> None:
        self._leave()
        changed = self.text.choose(token)
        self.branches[self.at] = changed
        self._move(len(changed.steps))

    def _leave(self) -> None:
        """Go back to the cursor; a longer text is kept as another branch."""
        if self.cursor < len(self.text.steps):
            self.branches.append(self.text)
            self.branches[self.at] = self.text.rewind(self.cursor)
            self.message = f"the rest stays as branch {len(self.branches)}"

    def _move(self, cursor: int) -> None:
        self.cursor, self.chosen = cursor, 0
