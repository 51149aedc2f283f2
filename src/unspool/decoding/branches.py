"""Building blocks of strategies that choose tokens themselves, outside the engine's sampling.

A strategy that compares several texts holds branches (`HeldBranches`), gets the likeliest next
tokens (`top_next_tokens`), and collects its choices in a `PartialText` until one becomes a
`Generation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from types import TracebackType
from typing import Any

import numpy as np

from unspool.backends.interventions import BranchInterventions
from unspool.backends.step import Logits
from unspool.engine.engine import Engine
from unspool.engine.generation import Generation, texts_html, why_full
from unspool.engine.loop import concat_logits
from unspool.engine.request import StopChecker
from unspool.engine.results import Step, explained_step
from unspool.engine.tree import Branch
from unspool.errors import SettingsError, UnspoolError
from unspool.sampling import Candidate, Pick, Scores, score
from unspool.session import Session

Prompt = str | Sequence[int]
Scorer = Callable[[Generation], float]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Texts for one prompt with their scores, best first."""

    generations: tuple[Generation, ...]  # best first
    scores: tuple[float, ...]  # of each text; higher is better

    def __repr__(self) -> str:
        return f"<Ranking of {len(self.scores)}, best {self.scores[0]:.4g}: {self.best!r}>"

    def _repr_html_(self) -> str:
        return texts_html(self.generations, [f"score {score:.4g}" for score in self.scores])

    @property
    def best(self) -> Generation:
        """The text with the highest score."""
        return self.generations[0]


def mean_logprob(generation: Generation) -> float:
    """Mean log-probability per token, comparable across lengths."""
    return generation.logprob / len(generation.steps) if generation.steps else -math.inf


def score_text(scorer: Scorer | None, generation: Generation) -> float:
    """Score a text; errors of the caller's scorer are reported as such."""
    if scorer is None:
        return mean_logprob(generation)
    try:
        value = float(scorer(generation))
    except Exception as error:
        raise UnspoolError(f"the scorer raised {type(error).__name__}: {error}") from error
    if math.isnan(value):
        raise UnspoolError("the scorer returned nan; it must return a number (higher is better)")
    return value


def check_int(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Check that an option is an integer within its bounds, and return it."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not fits or (most is not None and value > most):
        bounds = f">= {least}" if most is None else f"from {least} to {most}"
        raise SettingsError(f"{name} must be an integer {bounds}, got {value!r}")
    return int(value)


def prepare_generation(
    lm: Session, prompt: Prompt, *, max_tokens: int, **options: Any
) -> Generation:
    """Prepare a generation whose tokens a strategy will choose, not the engine."""
    check_int("max_tokens", max_tokens, least=0)
    # With max_tokens=0 the engine only validates prompt and options.
    generation, _ = lm.begin(prompt, max_tokens=0, **options)
    limits = replace(generation.request.limits, max_tokens=max_tokens)
    generation.request = replace(generation.request, limits=limits)
    generation.empty_reason = why_full(generation.request, 0)
    return generation


@dataclass(frozen=True, slots=True)
class PartialText:
    """An immutable partial text: adding a token returns a new line, so one can branch."""

    start: Generation  # without steps: the prompt and the stop conditions
    token_bytes: Callable[[int], bytes]
    steps: tuple[Step, ...] = ()
    ending: StopChecker | None = None
    since: float = field(default_factory=perf_counter)

    @property
    def room(self) -> int:
        """Number of tokens that may still be added."""
        most: int = self.start.request.limits.room(len(self.start.prompt))
        return max(0, most - len(self.steps))

    @property
    def finished(self) -> bool:
        return self.steps[-1].finish_reason is not None if self.steps else self.room == 0

    def add(self, pick: Pick) -> PartialText:
        """Return the line with one more token, finished if that token ends it."""
        limits, prompt = self.start.request.limits, len(self.start.prompt)
        position = prompt + len(self.steps)
        ending = self.ending.copy() if self.ending else StopChecker(limits, prompt)
        partial_utf8 = ending.text.partial_utf8
        text_piece, finish = ending.push(pick.token, self.token_bytes(pick.token), position + 1)
        if finish:
            text_piece += ending.finish()
        now = perf_counter()
        step = explained_step(
            pick,
            position,
            text_piece,
            self.token_bytes,
            now - self.since,
            finish,
            partial_utf8=partial_utf8,
        )
        return PartialText(self.start, self.token_bytes, (*self.steps, step), ending, now)

    def generation(self) -> Generation:
        """Convert to a `Generation`."""
        return replace(self.start, steps=list(self.steps))


@dataclass(frozen=True, slots=True)
class NextTokens:
    """The likeliest next tokens of several texts: arrays [texts, count], likeliest first."""

    scores: Scores
    top: int  # candidates reported per step

    @property
    def tokens(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self.scores.top_tokens

    @property
    def logprobs(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return self.scores.top_logprobs

    def pick(self, row: int, place: int) -> Pick:
        """Candidate number `place` of a row, as a picked token."""
        tokens, logprobs = self.tokens[row], self.logprobs[row]
        return Pick(
            token=int(tokens[place]),
            logprob=float(logprobs[place]),
            rank=int(np.sum(logprobs > logprobs[place])),  # ties share a rank
            entropy=float(self.scores.entropies[row]),
            probability=1.0,
            draw=None,
            candidates=tuple(
                Candidate(int(tokens[n]), float(logprobs[n]), float(n == place))
                for n in range(min(self.top, len(tokens)))
            ),
        )


def top_next_tokens(logits: Sequence[Logits], count: int, top: int) -> NextTokens:
    """Compute the `count` likeliest next tokens per text; logits are [1, vocabulary] each."""
    rows = concat_logits(logits)
    return NextTokens(score(rows, [0] * len(rows), max(count, top)), top)


class HeldBranches:
    """The branches that a strategy holds; all are released on exit.

    with HeldBranches(lm.engine, lm.adapter) as branches:
        branch = branches.open(ids)
        one, other = branches.move([branch, branch])      # fork
        other, = branches.move([other])                   # prune: `one` is released
    """

    def __init__(
        self,
        engine: Engine,
        adapter: str | None = None,
        interventions: BranchInterventions | None = None,
    ) -> None:
        self._engine, self._adapter, self._interventions = engine, adapter, interventions
        self._branches: set[Branch] = set()

    def open(self, tokens: Sequence[int]) -> Branch:
        branch = self._engine.open(tokens, self._adapter, self._interventions)
        self._branches.add(branch)
        return branch

    def move(self, parents: Sequence[Branch]) -> list[Branch]:
        """Return one branch per entry of `parents`; branches not listed are released.

        The first child takes over its parent's branch, the others fork it. One call to the engine
        thread.
        """
        return self._engine.call(lambda: self._move(parents))

    def _move(self, parents: Sequence[Branch]) -> list[Branch]:
        for branch in self._branches.difference(parents):
            self._engine.release(branch)
        self._branches.intersection_update(parents)
        used: set[Branch] = set()
        children: list[Branch] = []
        for parent in parents:
            child = self._engine.fork(parent) if parent in used else parent
            used.add(child)
            children.append(child)
        self._branches |= used
        return children

    def __enter__(self) -> HeldBranches:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._branches:
            self._engine.loop.clean_up(self._release_all)

    def _release_all(self) -> None:
        # After an error in one branch of a batch, others may still be running; releasing a branch
        # ends its task too.
        self._move(())
