"""What people ask: sessions whose prompts share their beginnings.

Prompts form a tree. At its root lie the system prompts of applications, a few of which have most of
the users (Zipf). Behind them a session is one of three kinds:

    chat      several turns; each prompt is everything said so far, and then the next question
    document  a long document, which several people ask about, and a few questions each
    single    one question and one answer

Lengths have heavy tails (log-normal, cut at `longest`). All of it follows from a seed; what a
session says does not depend on when it is answered, so policies are compared on the same words. The
next turn comes when its reader has read the answer: a slow fleet is asked later, not less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.random import Generator

from fleets.arrivals import Arrivals

LOWEST_TOKEN, TOKEN_COUNT = 1000, 30_000  # ids that every vocabulary of ours has, and no control


@dataclass(frozen=True)
class Lengths:
    """Log-normal: half are below the median, and the tail is heavier with `spread`."""

    median: float
    spread: float = 0.8
    longest: int = 4096

    def draw(self, chance: Generator) -> int:
        length = self.median * np.exp(self.spread * chance.standard_normal())
        return int(min(max(1, round(length)), self.longest))


@dataclass(frozen=True)
class Mix:
    """What sessions are made of."""

    applications: int = 200
    popularity: float = 1.1  # Zipf's exponent: the n-th has 1 / n to the power of this
    documents: int = 400
    chats: float = 0.55  # shares of the kinds; the rest are single questions
    asked_documents: float = 0.15
    turns: float = 4.0  # of a chat, on average
    system: Lengths = field(default_factory=lambda: Lengths(400, 0.9, 3000))
    document: Lengths = field(default_factory=lambda: Lengths(2500, 0.7, 12_000))
    question: Lengths = field(default_factory=lambda: Lengths(45, 1.0, 1500))
    answer: Lengths = field(default_factory=lambda: Lengths(160, 0.8, 1200))
    pause: Lengths = field(default_factory=lambda: Lengths(10, 0.8, 120))  # s between turns
    context: int = 16_384  # a session whose next prompt and answer do not fit has ended


@dataclass(frozen=True, slots=True)
class Turn:
    question: list[int]
    answer: list[int]
    pause_s: float  # since the answer before it


@dataclass(slots=True, eq=False)
class Session:
    """Somebody who asks one thing after the other."""

    number: int
    kind: str
    begins: float
    opening: list[int]  # the system prompt, and the document if there is one
    turns: list[Turn]

    def prompt(self, turn: int, answers: list[list[int]]) -> list[int]:
        """The opening, what was said in earlier turns, and the question."""
        found = list(self.opening)
        for said, answer in zip(self.turns[:turn], answers[:turn], strict=True):
            found += said.question
            found += answer
        return found + self.turns[turn].question


def make_trace(
    seed: int, arrivals: Arrivals, seconds: float, mix: Mix | None = None, start_hour: float = 15.0
) -> list[Session]:
    """Sessions in the order in which they begin."""
    mix = Mix() if mix is None else mix
    times = arrivals.times(np.random.default_rng([seed, 1]), seconds, start_hour)
    words = _Words(seed, mix)
    return [words.session(number, begins) for number, begins in enumerate(times)]


@cache
def requests_per_session(mix: Mix) -> float:
    """How many requests a session comes to, on average: a rate of requests over a rate of
    sessions. Measured, because sessions end early where their context is full."""
    words = _Words(0, mix)
    return float(np.mean([len(words.session(number, 0.0).turns) for number in range(2000)]))


class _Words:
    """Makes sessions; each from a generator of its own, so that one does not change another."""

    def __init__(self, seed: int, mix: Mix) -> None:
        self.seed, self.mix = seed, mix
        chance = np.random.default_rng([seed, 2])
        self.systems = [_tokens(chance, mix.system.draw(chance)) for _ in range(mix.applications)]
        self.papers = [_tokens(chance, mix.document.draw(chance)) for _ in range(mix.documents)]
        self.which_system = _zipf(mix.applications, mix.popularity)
        self.which_paper = _zipf(mix.documents, mix.popularity)

    def session(self, number: int, begins: float) -> Session:
        mix, chance = self.mix, np.random.default_rng([self.seed, 3, number])
        opening = list(self.systems[_pick(chance, self.which_system)])
        kind = chance.random()
        if kind < mix.chats:
            name, count = "chat", int(chance.geometric(1 / mix.turns))
        elif kind < mix.chats + mix.asked_documents:
            name, count = "document", int(chance.geometric(0.5))
            opening += self.papers[_pick(chance, self.which_paper)]
        else:
            name, count = "single", 1
        turns = list(self._turns(chance, count, mix.context - len(opening)))
        return Session(number, name, begins, opening, turns)

    def _turns(self, chance: Generator, count: int, room: int) -> Iterator[Turn]:
        mix = self.mix
        for number in range(count):
            question = _tokens(chance, mix.question.draw(chance))
            answer = _tokens(chance, mix.answer.draw(chance))
            pause = mix.pause.draw(chance)
            room -= len(question) + len(answer)
            if room < 0 and number:
                return
            yield Turn(question, answer, float(pause))


def _tokens(chance: Generator, count: int) -> list[int]:
    found: list[int] = (LOWEST_TOKEN + chance.integers(0, TOKEN_COUNT, count)).tolist()
    return found


def _zipf(count: int, exponent: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The share of all up to the n-th."""
    shares = np.arange(1, count + 1) ** -exponent
    return np.cumsum(shares / shares.sum())


def _pick(chance: Generator, shares: np.ndarray[tuple[int], np.dtype[np.float64]]) -> int:
    return min(int(np.searchsorted(shares, chance.random())), len(shares) - 1)
