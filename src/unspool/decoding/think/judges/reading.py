"""What a judge's model reads: the question and the text, as tokens of its own, computed once.

A judge may be another model with another vocabulary and another template. So texts are told to it
as a conversation in its own words; where it is the very model that wrote them, it goes on from what
is in the tree already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unspool.engine.generation import Generation
from unspool.session import Session

Messages = Sequence[Mapping[str, Any]]
_AT_ONCE = 16  # texts that are read in one batch


@dataclass(slots=True)
class Reader:
    """A model that reads texts of another, or its own.

    `asked` is the conversation that the texts answer, where somebody knows it; else the prompt's
    text stands for it, as one message.
    """

    lm: Session  # who reads
    writer: Session
    asked: Messages | None = None
    _read: list[Sequence[int]] = field(default_factory=list)  # what is in its tree already

    @property
    def is_writer(self) -> bool:
        """Whether it judges its own texts."""
        return self.lm.engine is self.writer.engine

    def plain(self, text: Generation) -> list[int]:
        """Prompt and text as they stand: for a model without a chat template."""
        if self.is_writer or not self._has_words(self.lm):
            return [*text.prompt, *text.tokens]
        return self.lm.tokenizer.encode_prompt(self.prompt_of(text) + text.text)

    def messages(self, text: Generation) -> list[Mapping[str, Any]]:
        """What was asked, and the text as the answer to it."""
        asked = self.asked or [{"role": "user", "content": self.prompt_of(text)}]
        return [*asked, {"role": "assistant", "content": text.text}]

    def prompt_of(self, text: Generation) -> str:
        """The prompt without control tokens."""
        return self.writer.tokenizer.decode(text.prompt, specials=False)

    def fits(self, row: Sequence[int]) -> bool:
        """Whether the model's context holds that much."""
        return 0 < len(row) <= self.lm.context

    @staticmethod
    def _has_words(lm: Session) -> bool:
        return lm._tokenizer is not None

    # -- reading together what begins alike ----------------------------------------------------

    def cost(self, rows: Sequence[Sequence[int]]) -> int:
        """Tokens that are computed for these rows at the most: what pages are not shared."""
        known, total = list(self._read), 0
        for number, row in enumerate(rows):
            total += len(row) - self._shared(row, known)
            if number == 0:
                known.append(row)
        return total

    def knows(self, row: Sequence[int]) -> None:
        """These tokens are in the tree already."""
        self._read = [*self._read[-63:], row]

    def batches(self, count: int) -> Iterator[range]:
        """Which rows to read together: the first alone, so that the others share its beginning."""
        if count:
            yield range(1)
        for start in range(1, count, _AT_ONCE):
            yield range(start, min(start + _AT_ONCE, count))

    def _shared(self, row: Sequence[int], known: Sequence[Sequence[int]]) -> int:
        """How much of a row is computed already; whole pages, and never its last token."""
        page = self.lm.engine.tree.page_size
        longest = max((_common(row, other) for other in known), default=0)
        return min(longest, len(row) - 1) // page * page


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    most = min(len(one), len(other))
    for place in range(most):
        if one[place] != other[place]:
            return place
    return most
