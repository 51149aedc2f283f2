"""Input of a verifier's model: the question and the text in its own tokens.

A verifier may be another model with another vocabulary and chat template, so texts are encoded anew
as a conversation. If it is the model that wrote them, it continues from the cached prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unspool.engine.generation import Generation
from unspool.session import Session

Messages = Sequence[Mapping[str, Any]]
_BATCH_SIZE = 16  # texts


@dataclass(slots=True)
class Reader:
    """A model that reads texts written by another model or by itself.

    `conversation` has the messages that the texts answer; without it, the prompt's text is used as
    one message.
    """

    lm: Session  # the reading model
    writer: Session
    conversation: Messages | None = None
    _cached_rows: list[Sequence[int]] = field(
        default_factory=list
    )  # rows in its prefix cache, most recent last

    @property
    def is_writer(self) -> bool:
        """Whether it reads its own texts."""
        return self.lm.engine is self.writer.engine

    def plain(self, text: Generation) -> list[int]:
        """Prompt and text without a template."""
        if self.is_writer or not self._has_tokenizer(self.lm):
            return [*text.prompt, *text.tokens]
        return self.lm.tokenizer.encode_prompt(self.prompt_of(text) + text.text)

    def messages(self, text: Generation) -> list[Mapping[str, Any]]:
        """The conversation, with the text as the last answer."""
        conversation = self.conversation or [{"role": "user", "content": self.prompt_of(text)}]
        return [*conversation, {"role": "assistant", "content": text.text}]

    def prompt_of(self, text: Generation) -> str:
        """The prompt's text without control tokens."""
        return self.writer.tokenizer.decode(text.prompt, specials=False)

    def fits(self, row: Sequence[int]) -> bool:
        """Whether the row fits the model's context."""
        return 0 < len(row) <= self.lm.context

    @staticmethod
    def _has_tokenizer(lm: Session) -> bool:
        return lm._tokenizer is not None

    # -- sharing common prefixes ---------------------------------------------------------------

    def cost(self, rows: Sequence[Sequence[int]]) -> int:
        """Upper bound of the tokens computed for these rows, minus shared pages."""
        cached_rows, total = list(self._cached_rows), 0
        for number, row in enumerate(rows):
            total += len(row) - self._shared(row, cached_rows)
            if number == 0:
                cached_rows.append(row)
        return total

    def mark_cached(self, row: Sequence[int]) -> None:
        """Record that these tokens are in the prefix cache."""
        self._cached_rows = [*self._cached_rows[-63:], row]

    def batches(self, count: int) -> Iterator[range]:
        """Row ranges per batch; the first row runs alone, so that the others share its prefix."""
        if count:
            yield range(1)
        for start in range(1, count, _BATCH_SIZE):
            yield range(start, min(start + _BATCH_SIZE, count))

    def _shared(self, row: Sequence[int], cached_rows: Sequence[Sequence[int]]) -> int:
        """Number of cached tokens of a row: whole pages, and never its last token."""
        page = self.lm.engine.tree.page_size
        longest = max((_common_length(row, other) for other in cached_rows), default=0)
        return min(longest, len(row) - 1) // page * page


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    length = min(len(first), len(second))
    for index in range(length):
        if first[index] != second[index]:
            return index
    return length
