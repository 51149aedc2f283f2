"""A judge at work: asked within the budget, and whatever it does wrong is told of the text alone
that it concerns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unspool.decoding.think.budget import Budget
from unspool.decoding.think.judge import Cancellable, Judge, Verdict, checked
from unspool.engine.generation import Generation
from unspool.engine.steps import Step

_PROBE = 16  # tokens of the text by which the price of judging is found out


class Judging:
    """Asks a judge for verdicts, and knows about what they cost."""

    def __init__(self, judge: Judge, budget: Budget, start: Generation) -> None:
        self.by, self._budget = judge, budget
        self._base, self._slope = self._prices(start)

    def cancel(self) -> None:
        """Have a judge that is at work, and knows how, end soon."""
        if isinstance(self.by, Cancellable):
            self.by.cancel()

    def price(self, length: int) -> int:
        """About what it costs to judge a text of so many tokens; what it is in the end is asked
        again."""
        return self._base + self._slope * length

    def verdicts(self, texts: Sequence[Generation]) -> list[Verdict]:
        """A verdict on each text, on all of them together if that works and can be paid."""
        try:
            cost = self.by.cost(texts)
            if cost <= self._budget.room:
                self._budget.take("judged", cost)
                found = self.by.judge(texts)
                if len(found) == len(texts):
                    return [checked(said) for said in found]
                why = f"the judge gave {len(found)} verdicts on {len(texts)} texts"
            else:
                why = "no budget was left to judge it"
        except Exception as error:
            why = f"the judge raised {type(error).__name__}: {error}"
        if len(texts) == 1:
            return [Verdict(None, why)]
        return [self.verdicts([text])[0] for text in texts]

    def _prices(self, start: Generation) -> tuple[int, int]:
        """What an empty text costs, and every token more."""
        last = start.prompt[-1]
        step = Step(last, b" a", " a", 0.0, len(start.prompt))
        try:
            base = self.by.cost([start])
            longer = self.by.cost([replace(start, steps=[step] * _PROBE)])
        except Exception:
            return 0, 0  # it will fail in words when it is asked to judge
        if longer <= 0:
            return 0, 0
        return base, max(1, -(-(longer - base) // _PROBE))
