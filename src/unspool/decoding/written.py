"""What all strategies share: a text that is written from outside the engine, and its branches.

The engine's own texts (`engine/sequence.py`) pick one token after the other. A strategy that weighs
several texts against each other picks for itself: it holds branches (`Branches`), asks what could
come next (`weigh`), and keeps what it wrote as a `Line` until one of them becomes a `Generation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from types import TracebackType
from typing import Any

import numpy as np

from unspool.backends.step import Logits
from unspool.engine.branch import Branch
from unspool.engine.ending import Ending
from unspool.engine.engine import Engine
from unspool.engine.generation import Generation, texts_html, why_full
from unspool.engine.picking import joined
from unspool.engine.steps import Step, explained_step
from unspool.errors import SettingsError, UnspoolError
from unspool.sampling import Candidate, Pick, Scores, score
from unspool.session import Session

Prompt = str | Sequence[int]
Scorer = Callable[[Generation], float]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Texts for one prompt, the best first, with the scores that put them in order."""

    generations: tuple[Generation, ...]
    scores: tuple[float, ...]

    def __repr__(self) -> str:
        return f"<Ranking of {len(self.scores)}, best {self.scores[0]:.4g}: {self.best!r}>"

    def _repr_html_(self) -> str:
        return texts_html(self.generations, [f"score {score:.4g}" for score in self.scores])

    @property
    def best(self) -> Generation:
        """The first of them."""
        return self.generations[0]


def mean_logprob(generation: Generation) -> float:
    """How likely the model found its text, a token on average: the same yardstick at any length."""
    return generation.logprob / len(generation.steps) if generation.steps else -math.inf


def judged(scorer: Scorer | None, generation: Generation) -> float:
    """A text's score; what a caller's scorer does wrong is told as such."""
    if scorer is None:
        return mean_logprob(generation)
    try:
        value = float(scorer(generation))
    except Exception as error:
        raise UnspoolError(f"the scorer raised {type(error).__name__}: {error}") from error
    if math.isnan(value):
        raise UnspoolError("the scorer gave nan; it must give a number, higher for a better text")
    return value


def whole(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """A whole number within its bounds, or an error that names them."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not fits or (most is not None and value > most):
        bounds = f"from {least} up" if most is None else f"from {least} to {most}"
        raise SettingsError(f"{name} is {value!r}; it may be a whole number {bounds}")
    return int(value)


def blank(lm: Session, prompt: Prompt, *, max_tokens: int, **options: Any) -> Generation:
    """A generation without steps that the engine does not write: a strategy will."""
    whole("max_tokens", max_tokens, least=0)
    # Asked for no token, the engine only checks prompt and options, and ends the text at once.
    generation, _ = lm.begin(prompt, max_tokens=0, **options)
    limits = replace(generation.request.limits, max_tokens=max_tokens)
    generation.request = replace(generation.request, limits=limits)
    generation.empty_reason = why_full(generation.request, 0)
    return generation


# -- a text on its way -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """A text on its way. Adding a token gives a new line, so that one can go on in many ways."""

    start: Generation  # without steps: the prompt, and when to stop
    token_bytes: Callable[[int], bytes]
    steps: tuple[Step, ...] = ()
    ending: Ending | None = None
    since: float = field(default_factory=perf_counter)

    @classmethod
    def of(cls, lm: Session, start: Generation) -> Line:
        return cls(start, lm.engine.token_bytes)

    @property
    def room(self) -> int:
        """How many more tokens may come."""
        most: int = self.start.request.limits.room(len(self.start.prompt))
        return max(0, most - len(self.steps))

    @property
    def finished(self) -> bool:
        return self.steps[-1].finish_reason is not None if self.steps else self.room == 0

    def add(self, pick: Pick) -> Line:
        """The line with one more token, finished if that token ends it."""
        limits, prompt = self.start.request.limits, len(self.start.prompt)
        position = prompt + len(self.steps)
        ending = self.ending.copy() if self.ending else Ending(limits, prompt)
        begun = ending.text.half
        shown, finish = ending.push(pick.token, self.token_bytes(pick.token), position + 1)
        if finish:
            shown += ending.finish()
        now = perf_counter()
        step = explained_step(
            pick, position, shown, self.token_bytes, now - self.since, finish, begun=begun
        )
        return Line(self.start, self.token_bytes, (*self.steps, step), ending, now)

    def generation(self) -> Generation:
        """What is written so far, to be kept, rewound or gone on with."""
        return replace(self.start, steps=list(self.steps))


# -- what could come next ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Weighed:
    """The likeliest next tokens of several texts, [texts, count] each, likeliest first."""

    found: Scores
    top: int  # candidates that each step tells

    @property
    def tokens(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self.found.top_tokens

    @property
    def logprobs(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return self.found.top_logprobs

    def pick(self, row: int, place: int) -> Pick:
        """The candidate at one place, as a picked token."""
        tokens, logprobs = self.tokens[row], self.logprobs[row]
        return Pick(
            token=int(tokens[place]),
            logprob=float(logprobs[place]),
            rank=int(np.sum(logprobs > logprobs[place])),  # equals share a rank
            entropy=float(self.found.entropies[row]),
            probability=1.0,
            draw=None,
            candidates=tuple(
                Candidate(int(tokens[n]), float(logprobs[n]), float(n == place))
                for n in range(min(self.top, len(tokens)))
            ),
        )


def weigh(logits: Sequence[Logits], count: int, top: int) -> Weighed:
    """The `count` likeliest next tokens of each text; logits are [1, vocabulary] each."""
    rows = joined(logits)
    return Weighed(score(rows, [0] * len(rows), max(count, top)), top)


# -- branches ----------------------------------------------------------------------------------


class Branches:
    """The branches that a strategy holds; whatever is left at the end, or at an error, is released.

    with Branches(lm.engine, lm.adapter) as held:
        branch = held.open(ids)
        one, other = held.move([branch, branch])      # fork
        other, = held.move([other])                   # prune: `one` is released
    """

    def __init__(self, engine: Engine, adapter: str | None = None) -> None:
        self._engine, self._adapter = engine, adapter
        self._held: set[Branch] = set()

    def open(self, tokens: Sequence[int]) -> Branch:
        branch = self._engine.open(tokens, self._adapter)
        self._held.add(branch)
        return branch

    def move(self, parents: Sequence[Branch]) -> list[Branch]:
        """A branch for each child of these parents; what has no child is released.

        The first child takes its parent's branch over, the others fork it. One trip to the
        engine's thread, however many they are.
        """
        return self._engine.call(lambda: self._move(parents))

    def _move(self, parents: Sequence[Branch]) -> list[Branch]:
        for branch in self._held.difference(parents):
            self._engine.release(branch)
        self._held.intersection_update(parents)
        taken: set[Branch] = set()
        children: list[Branch] = []
        for parent in parents:
            child = self._engine.fork(parent) if parent in taken else parent
            taken.add(child)
            children.append(child)
        self._held |= taken
        return children

    def __enter__(self) -> Branches:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._held:
            self._engine.loop.clean_up(self._release_all)

    def _release_all(self) -> None:
        # After an error in one branch of a batch the others may still be on their way; releasing
        # a branch ends its task too.
        self._move(())
