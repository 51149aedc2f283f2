"""Who says which text is better: the protocol of a judge, and those that need no other model.

A judge sees several texts at once, as votes and reward models want it, and gives a verdict on each.
One that fails (raises, gives no number) fails that text, in words, and nobody else's.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from unspool.backends.step import Logits
from unspool.decoding.voting import Extract, final_answer, finder, tally
from unspool.decoding.written import mean_logprob
from unspool.engine.branch import Branch
from unspool.engine.generation import Generation
from unspool.sampling.operations import operations
from unspool.sampling.scoring import log_softmax
from unspool.session import Session

_AT_ONCE = 2**25  # logits: bounds the memory that long texts need


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge says of one text."""

    score: float | None  # higher is better; None: it failed, and the text loses
    why: str = ""  # in words, where there is something to say
    answer: Hashable | None = None  # what the text answers, where answers are counted


@runtime_checkable
class Judge(Protocol):
    """Scores texts; higher is better."""

    @property
    def partial(self) -> bool:
        """Whether it can judge a text that is not finished."""

    def judge(self, texts: Sequence[Generation]) -> list[Verdict]:
        """A verdict on each text."""

    def cost(self, texts: Sequence[Generation]) -> int:
        """How many tokens its model will compute for these texts, at the most; 0 without one."""


@runtime_checkable
class Cancellable(Protocol):
    """A judge whose work can be ended early, from any thread; what it says then nobody hears."""

    def cancel(self) -> None: ...


class LogprobJudge:
    """How likely the writer itself finds its text, a token on average."""

    partial = True

    def judge(self, texts: Sequence[Generation]) -> list[Verdict]:
        return [Verdict(mean_logprob(text)) if text.steps else _EMPTY for text in texts]

    def cost(self, texts: Sequence[Generation]) -> int:
        return 0


class CertaintyJudge:
    """Self-certainty (Kang et al. 2025): how far the writer's distributions are from knowing
    nothing, KL(uniform || p) in nats, on average over the tokens. The text is read once more."""

    partial = True

    def __init__(self, lm: Session) -> None:
        self._lm = lm

    def judge(self, texts: Sequence[Generation]) -> list[Verdict]:
        rows = max(1, _AT_ONCE // self._lm.vocab_size)
        found: list[Verdict] = []
        group: list[Generation] = []
        for text in texts:
            if group and len(text.steps) + sum(len(one.steps) for one in group) > rows:
                found += self._together(group, rows)
                group = []
            group.append(text)
        return found + self._together(group, rows)

    def cost(self, texts: Sequence[Generation]) -> int:
        return sum(len(text.steps) for text in texts)  # what stands before them is in the tree

    def _together(self, texts: Sequence[Generation], rows: int) -> list[Verdict]:
        """Texts that are read in one batch; a long one, alone, is read in pieces of so many."""
        totals = [0.0] * len(texts)
        with ExitStack() as opened:
            read = [
                (number, text.tokens, opened.enter_context(self._open(text)))
                for number, text in enumerate(texts)
                if text.steps
            ]
            for start in range(0, max((len(tokens) for _, tokens, _ in read), default=0), rows):
                going = [one for one in read if len(one[1]) > start]
                ends = [min(start + rows, len(tokens)) for _, tokens, _ in going]
                parts = [  # logits stand behind the token before
                    (branch, tokens[max(0, start - 1) : end - 1])
                    for (_, tokens, branch), end in zip(going, ends, strict=True)
                ]
                wanted = [end - start for end in ends]
                found = self._lm.engine.extend_all(parts, wanted=wanted)
                for (number, _, _), logits in zip(going, found, strict=True):
                    totals[number] += _far_from_knowing_nothing(logits)
        return [
            Verdict(total / len(text.steps)) if text.steps else _EMPTY
            for text, total in zip(texts, totals, strict=True)
        ]

    def _open(self, text: Generation) -> AbstractContextManager[Branch]:
        return self._lm.opened(text.prompt, text.request.adapter)


def _far_from_knowing_nothing(logits: Logits) -> float:
    """KL(uniform || p) in nats, summed over rows of logits."""
    means = operations(logits).host(log_softmax(logits).mean(-1)).astype(np.float64)
    return float(np.sum(-means - math.log(logits.shape[-1])))


class VoteJudge:
    """Self-consistency (Wang et al. 2022): the share of texts that give the same answer. With
    another judge, each vote has the weight of that judge's score."""

    def __init__(self, extract: Extract = final_answer, weigher: Judge | None = None) -> None:
        self._find, self.weigher = finder(extract), weigher

    @property
    def partial(self) -> bool:
        return False  # the answer comes at the end

    def judge(self, texts: Sequence[Generation]) -> list[Verdict]:
        weighed = self.weigher.judge(texts) if self.weigher else [Verdict(1.0)] * len(texts)
        weights = _weights([verdict.score for verdict in weighed])
        found = self.answers(texts)
        answers = [one.answer for one in found]
        votes = tally(texts, answers, weights)
        total = math.fsum(votes.values()) or 1.0
        return [
            Verdict(None, one.why or "no answer was found in it") if one.answer is None
            else verdict if verdict.score is None
            else Verdict(votes[one.answer] / total, verdict.why, one.answer)
            for one, verdict in zip(found, weighed, strict=True)
        ]  # fmt: skip

    def answers(self, texts: Sequence[Generation]) -> list[Verdict]:
        """What each text answers; without an answer, why there is none."""
        return [Verdict(None, answer=self._find(text)) for text in texts]

    def cost(self, texts: Sequence[Generation]) -> int:
        return self.weigher.cost(texts) if self.weigher else 0

    def cancel(self) -> None:
        """Whoever weighs the votes need not go on."""
        if isinstance(self.weigher, Cancellable):
            self.weigher.cancel()


def checked(said: Any) -> Verdict:
    """A verdict from what a judge said of one text, which may be nonsense."""
    verdict = said if isinstance(said, Verdict) else Verdict(said)
    if verdict.score is None:
        return verdict if verdict.why else Verdict(None, "the judge gave no score")
    try:
        score = float(verdict.score)
        hash(verdict.answer)
    except (TypeError, ValueError):
        return Verdict(None, f"the judge gave {said!r}; it must give a number")
    if not math.isfinite(score):
        return Verdict(None, f"the judge gave {score}; it must give a finite number")
    return Verdict(score, str(verdict.why), verdict.answer)


def _weights(scores: Sequence[float | None]) -> list[float]:
    """Votes from scores: as they are where none is negative, else (log-probabilities, say) by
    e^score, so that a better text has more weight, and each has some."""
    known = [score for score in scores if score is not None]
    if min(known, default=0.0) >= 0:
        return [score or 0.0 for score in scores]
    best = max(known)
    return [0.0 if score is None else math.exp(score - best) for score in scores]


_EMPTY = Verdict(None, "there is not a single token to judge")
