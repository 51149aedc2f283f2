"""Verifiers score texts: the protocol, and the verifiers that need no other model.

A verifier gets several texts per call (votes and reward models need that) and returns a verdict for
each. A failure (an exception, no number) only fails the texts it concerns, with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from unspool.backends.step import Logits
from unspool.decoding.voting import Extract, answer_finder, final_answer, tally
from unspool.decoding.written import mean_logprob
from unspool.engine.branch import Branch
from unspool.engine.generation import Generation
from unspool.sampling.operations import array_operations
from unspool.sampling.scoring import log_softmax
from unspool.session import Session

_MAX_LOGITS = 2**25  # per batch: bounds memory use on long texts


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of scoring one text."""

    score: float | None  # higher is better; None: scoring failed, and the text loses
    why: str = ""  # explanation, or the reason of a failure
    answer: Hashable | None = None  # extracted answer, for votes


@runtime_checkable
class Verifier(Protocol):
    """Scores texts; higher is better."""

    @property
    def partial(self) -> bool:
        """Whether it can score an unfinished text."""

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        """Return one verdict per text."""

    def cost(self, texts: Sequence[Generation]) -> int:
        """Upper bound of the tokens its model computes for these texts; 0 without a model."""


@runtime_checkable
class Cancellable(Protocol):
    """A verifier that can be stopped early, from any thread; its verdicts are then ignored."""

    def cancel(self) -> None: ...


class LogprobVerifier:
    """Mean log-probability per token, by the model that wrote the text."""

    partial = True

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        return [Verdict(mean_logprob(text)) if text.steps else _EMPTY for text in texts]

    def cost(self, texts: Sequence[Generation]) -> int:
        return 0


class CertaintyVerifier:
    """Self-certainty (Kang et al. 2025): KL(uniform || p) in nats, averaged over the tokens.

    Needs one more forward pass over the text."""

    partial = True

    def __init__(self, lm: Session) -> None:
        self._lm = lm

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        rows = max(1, _MAX_LOGITS // self._lm.vocab_size)
        verdicts: list[Verdict] = []
        group: list[Generation] = []
        for text in texts:
            if group and len(text.steps) + sum(len(queued.steps) for queued in group) > rows:
                verdicts += self._score_batch(group, rows)
                group = []
            group.append(text)
        return verdicts + self._score_batch(group, rows)

    def cost(self, texts: Sequence[Generation]) -> int:
        return sum(len(text.steps) for text in texts)  # the prompt is cached

    def _score_batch(self, texts: Sequence[Generation], rows: int) -> list[Verdict]:
        """Score texts in one batch; a single long text is read in chunks of `rows` tokens."""
        totals = [0.0] * len(texts)
        with ExitStack() as stack:
            inputs = [
                (number, text.tokens, stack.enter_context(self._open(text)))
                for number, text in enumerate(texts)
                if text.steps
            ]
            for start in range(0, max((len(tokens) for _, tokens, _ in inputs), default=0), rows):
                active = [item for item in inputs if len(item[1]) > start]
                ends = [min(start + rows, len(tokens)) for _, tokens, _ in active]
                parts = [  # the logits of a token come from the position before it
                    (branch, tokens[max(0, start - 1) : end - 1])
                    for (_, tokens, branch), end in zip(active, ends, strict=True)
                ]
                num_logits = [end - start for end in ends]
                logits_rows = self._lm.engine.extend_all(parts, num_logits=num_logits)
                for (number, _, _), logits in zip(active, logits_rows, strict=True):
                    totals[number] += _kl_from_uniform(logits)
        return [
            Verdict(total / len(text.steps)) if text.steps else _EMPTY
            for text, total in zip(texts, totals, strict=True)
        ]

    def _open(self, text: Generation) -> AbstractContextManager[Branch]:
        return self._lm.open_branch(text.prompt, text.request.adapter)


def _kl_from_uniform(logits: Logits) -> float:
    """KL(uniform || p) in nats, summed over rows of logits."""
    means = array_operations(logits).to_numpy(log_softmax(logits).mean(-1)).astype(np.float64)
    return float(np.sum(-means - math.log(logits.shape[-1])))


class VoteVerifier:
    """Self-consistency (Wang et al. 2022): the share of texts that give the same answer. With
    `weigher`, each vote is weighted by that verifier's score."""

    def __init__(self, extract: Extract = final_answer, weigher: Verifier | None = None) -> None:
        self._find, self.weigher = answer_finder(extract), weigher

    @property
    def partial(self) -> bool:
        return False  # the answer comes last

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        weights_by = self.weigher.score(texts) if self.weigher else [Verdict(1.0)] * len(texts)
        weights = _weights([verdict.score for verdict in weights_by])
        extracted = self.answers(texts)
        answers = [result.answer for result in extracted]
        votes = tally(texts, answers, weights)
        total = math.fsum(votes.values()) or 1.0
        return [
            Verdict(None, result.why or "no answer was found in it") if result.answer is None
            else verdict if verdict.score is None
            else Verdict(votes[result.answer] / total, verdict.why, result.answer)
            for result, verdict in zip(extracted, weights_by, strict=True)
        ]  # fmt: skip

    def answers(self, texts: Sequence[Generation]) -> list[Verdict]:
        """Extract each text's answer; without one, the verdict has the reason."""
        return [Verdict(None, answer=self._find(text)) for text in texts]

    def cost(self, texts: Sequence[Generation]) -> int:
        return self.weigher.cost(texts) if self.weigher else 0

    def cancel(self) -> None:
        """Cancel the verifier that weighs the votes."""
        if isinstance(self.weigher, Cancellable):
            self.weigher.cancel()


def checked(returned: Any) -> Verdict:
    """Validate what a verifier returned for one text."""
    verdict = returned if isinstance(returned, Verdict) else Verdict(returned)
    if verdict.score is None:
        return verdict if verdict.why else Verdict(None, "the verifier gave no score")
    try:
        score = float(verdict.score)
        hash(verdict.answer)
    except (TypeError, ValueError):
        return Verdict(None, f"the verifier gave {returned!r}; it must give a number")
    if not math.isfinite(score):
        return Verdict(None, f"the verifier gave {score}; it must give a finite number")
    return Verdict(score, str(verdict.why), verdict.answer)


def _weights(scores: Sequence[float | None]) -> list[float]:
    """Vote weights from scores: unchanged if none is negative, else exp(score) (log-probabilities),
    so that a better text weighs more and each weighs something."""
    valid = [score for score in scores if score is not None]
    if min(valid, default=0.0) >= 0:
        return [score or 0.0 for score in scores]
    best = max(valid)
    return [0.0 if score is None else math.exp(score - best) for score in scores]


_EMPTY = Verdict(None, "the text has no tokens to score")
