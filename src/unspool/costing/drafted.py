"""What drafts save: the same text with and without guessing ahead."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from unspool.costing.part import Figure
from unspool.costing.statistics import median_figure
from unspool.engine.generation import Generation
from unspool.errors import UnspoolError
from unspool.language_model import LanguageModel


@dataclass(frozen=True)
class Drafted:
    """One way of guessing on one kind of text."""

    name: str
    savings: list[float]  # seconds without / with, a round each
    text: Generation

    @property
    def accepted(self) -> float:
        """The share of tokens that a draft had guessed."""
        steps = self.text.steps
        return sum(step.draft == "accepted" for step in steps) / max(1, len(steps))

    def figures(self) -> list[Figure]:
        count = len(self.text.steps)
        return [
            median_figure(f"speed with {self.name}", self.savings, "×", better="higher",
                          why="seconds without / with, the same text"),
            Figure(f"guessed by {self.name}", self.accepted, "%", n=count, why="of the tokens"),
        ]  # fmt: skip


def drafted(lm: LanguageModel, ids: Sequence[int], rounds: int, tokens: int) -> list[Drafted]:
    """Drafts on free text and where the text is to be copied; heads where the model has one."""
    half = len(ids) // 2
    copying = [*ids[:half], *ids[:half], *ids[: half // 2]]  # the third time it is known
    found = []
    for who, spec in (("lookup drafts", "lookup"), ("a drafting head", "head")):
        with suppress(UnspoolError):  # a model without a head, or that cannot be rewound
            found.append(_timed(lm, f"{who}, free text", ids, spec, rounds, tokens))
            found.append(_timed(lm, f"{who}, copying", copying, spec, rounds, tokens))
    return found


def _timed(
    lm: LanguageModel, name: str, ids: Sequence[int], spec: str, rounds: int, tokens: int
) -> Drafted:
    savings = []
    lm.generate(ids, max_tokens=1)  # the prompt is read before either
    for _ in range(rounds):
        plain = lm.generate(ids, max_tokens=tokens, temperature=0.0, end=False)
        text = lm.generate(ids, max_tokens=tokens, temperature=0.0, end=False, speculate=spec)
        savings.append(plain.usage.total_seconds / text.usage.total_seconds)
    return Drafted(name, savings, text)
