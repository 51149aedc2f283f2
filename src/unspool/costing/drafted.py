"""The speedup of speculative decoding: the same text with and without drafts."""

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
class DraftResult:
    """One drafter on one kind of text."""

    name: str
    savings: list[float]  # per round: seconds without / with drafts
    text: Generation

    @property
    def accepted(self) -> float:
        """The share of tokens that came from a draft."""
        steps = self.text.steps
        return sum(step.draft == "accepted" for step in steps) / max(1, len(steps))

    def figures(self) -> list[Figure]:
        count = len(self.text.steps)
        return [
            median_figure(f"speed with {self.name}", self.savings, "×", better="higher",
                          why="seconds without / with, the same text"),
            Figure(f"accepted from {self.name}", self.accepted, "%", n=count, why="of the tokens"),
        ]  # fmt: skip


def measure_drafts(
    lm: LanguageModel, ids: Sequence[int], rounds: int, tokens: int
) -> list[DraftResult]:
    """Measure drafters on free text and on text to copy; a draft head if the model has one."""
    half = len(ids) // 2
    copying = [*ids[:half], *ids[:half], *ids[: half // 2]]  # the third copy can be looked up
    results = []
    for drafter, spec in (("lookup drafts", "lookup"), ("a draft head", "head")):
        with suppress(UnspoolError):  # a model without a head, or that cannot be rewound
            results.append(_measure_drafter(lm, f"{drafter}, free text", ids, spec, rounds, tokens))
            results.append(
                _measure_drafter(lm, f"{drafter}, copying", copying, spec, rounds, tokens)
            )
    return results


def _measure_drafter(
    lm: LanguageModel, name: str, ids: Sequence[int], spec: str, rounds: int, tokens: int
) -> DraftResult:
    savings = []
    lm.generate(ids, max_tokens=1)  # prefill before both
    for _ in range(rounds):
        plain = lm.generate(ids, max_tokens=tokens, temperature=0.0, end=False)
        text = lm.generate(ids, max_tokens=tokens, temperature=0.0, end=False, speculate=spec)
        savings.append(plain.usage.total_seconds / text.usage.total_seconds)
    return DraftResult(name, savings, text)
