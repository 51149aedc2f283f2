"""Runs a verifier within the budget; its failures only fail the texts they concern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unspool.decoding.think.budget import TokenBudget
from unspool.decoding.think.judge import Cancellable, Verdict, Verifier, checked
from unspool.engine.generation import Generation
from unspool.engine.steps import Step

_PROBE = 16  # tokens of the dummy text that the cost per token is measured with


class VerifierRunner:
    """Calls a verifier and estimates what it costs."""

    def __init__(self, judge: Verifier, budget: TokenBudget, start: Generation) -> None:
        self.verifier, self._budget = judge, budget
        self._base, self._slope = self._measure_cost(start)

    def cancel(self) -> None:
        """Stop the verifier if it supports that."""
        if isinstance(self.verifier, Cancellable):
            self.verifier.cancel()

    def estimate_cost(self, length: int) -> int:
        """Estimated cost in tokens of scoring a text of `length` tokens."""
        return self._base + self._slope * length

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        """Score all texts in one call if that works and the budget allows, else one by one."""
        try:
            cost = self.verifier.cost(texts)
            if cost <= self._budget.remaining:
                self._budget.reserve("judged", cost)
                verdicts = self.verifier.score(texts)
                if len(verdicts) == len(texts):
                    return [checked(verdict) for verdict in verdicts]
                why = f"the verifier gave {len(verdicts)} verdicts for {len(texts)} texts"
            else:
                why = "no budget was left to score it"
        except Exception as error:
            why = f"the verifier raised {type(error).__name__}: {error}"
        if len(texts) == 1:
            return [Verdict(None, why)]
        return [self.score([text])[0] for text in texts]

    def _measure_cost(self, start: Generation) -> tuple[int, int]:
        """Cost of an empty text, and of each further token."""
        last = start.prompt[-1]
        step = Step(last, b" a", " a", 0.0, len(start.prompt))
        try:
            base = self.verifier.cost([start])
            longer = self.verifier.cost([replace(start, steps=[step] * _PROBE)])
        except Exception:
            return 0, 0  # the error is reported when texts are scored
        if longer <= 0:
            return 0, 0
        return base, max(1, -(-(longer - base) // _PROBE))
