"""The load: sessions whose prompts share prefixes, and when they start.

Prompts form a tree. At its root are the system prompts of applications; a few of them have most of
the users (Zipf). A session after it is one of three kinds:

    chat      several turns; each prompt is the conversation so far and the next question
    document  a long document that several users ask about, with a few questions each
    single    one question and one answer

Lengths have heavy tails (log-normal, cut at `longest`). Sessions start in bursts: the rate switches
between calm and burst (a Markov-modulated Poisson process). All of it follows from a seed, and what
a session says does not depend on when it is answered, so that policies are compared on the same
prompts. The next turn comes after its user has read the answer: a slow fleet is asked later, not
less.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.random import Generator

LOWEST_TOKEN, NUM_TOKENS = 1000, 30_000  # ids that all our vocabularies have, no control tokens
RequestState = Literal["", "finished", "refused", "lost"]


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its answer and the times of events in seconds since the start; < 0: not yet."""

    number: int
    prompt: list[int]
    answer: list[int]
    arrival: float
    session: int = -1
    turn: int = 0
    outcome: RequestState = ""
    first: float = -1.0  # when the user had the first token
    last: float = -1.0  # ... the latest one
    delivered: int = 0  # tokens that the user has
    attempts: int = 0
    replica: str = ""  # the last one it was sent to
    cached: int = 0  # prompt tokens found in the cache, as the server reports it
    computed: int = 0  # prompt tokens computed, in all attempts
    gaps: Any = field(default_factory=lambda: array("d"))  # seconds between tokens

    @property
    def first_token_s(self) -> float:
        return self.first - self.arrival

    def deliver(self, count: int, now: float) -> None:
        """Deliver tokens up to `count`; those of an earlier attempt are the same, so not again."""
        if count <= self.delivered:
            return
        self.delivered = count
        if self.first < 0:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now

    def end(self, outcome: RequestState) -> None:
        if self.outcome:
            raise AssertionError(f"request {self.number} ended twice: {self.outcome}, {outcome}")
        self.outcome = outcome


@dataclass(frozen=True)
class Arrivals:
    """Start times of sessions, `rate` per second on average."""

    rate: float
    burst: float = 3.0  # rate of a burst relative to calm; 1: no bursts
    burst_s: float = 5.0  # mean duration of a burst
    calm_s: float = 25.0
    jump_at: float | None = None  # from this second on, the rate is `jump` times as high
    jump: float = 1.0

    def times(self, random: Generator, seconds: float) -> list[float]:
        calm = (self.calm_s + self.burst_s) / (self.calm_s + self.burst * self.burst_s)
        highest = max(1.0, self.jump)
        moments: list[float] = []
        now, bursting = 0.0, random.random() < self.burst_s / (self.calm_s + self.burst_s)
        while now < seconds:
            duration = random.exponential(self.burst_s if bursting else self.calm_s)
            end = min(seconds, now + duration)
            rate = self.rate * calm * (self.burst if bursting else 1.0)
            # Thinning: arrivals at the highest rate, accepted with the rate of their moment.
            while rate > 0:
                now += random.exponential(1 / (rate * highest))
                if now >= end:
                    break
                has_jumped = self.jump_at is not None and now >= self.jump_at
                if random.random() * highest < (self.jump if has_jumped else 1.0):
                    moments.append(now)
            now, bursting = end, not bursting
        return moments


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths: half are below the median, and `spread` makes the tail heavier."""

    median: float
    spread: float = 0.8
    longest: int = 4096

    def draw(self, random: Generator) -> int:
        length = self.median * np.exp(self.spread * random.standard_normal())
        return int(min(max(1, round(length)), self.longest))


@dataclass(frozen=True)
class Mix:
    """What sessions consist of."""

    applications: int = 200
    popularity: float = 1.1  # Zipf's exponent: the n-th has a share of 1 / n ** popularity
    documents: int = 400
    chats: float = 0.55  # share of chats; neither chat nor document: a single question
    asked_documents: float = 0.15
    turns: float = 4.0  # mean of a chat
    system: Lengths = Lengths(400, 0.9, 3000)
    document: Lengths = Lengths(2500, 0.7, 12_000)
    question: Lengths = Lengths(45, 1.0, 1500)
    answer: Lengths = Lengths(160, 0.8, 1200)
    pause: Lengths = Lengths(10, 0.8, 120)  # seconds between turns
    context: int = 16_384  # a session ends when its next prompt and answer do not fit


# Short enough for a small model on one core, with the same parts.
SMALL = Mix(
    applications=6, documents=4, chats=0.6, asked_documents=0.2, turns=3.0,
    system=Lengths(120, 0.4, 250), document=Lengths(200, 0.3, 350),
    question=Lengths(14, 0.6, 40), answer=Lengths(16, 0.5, 40), pause=Lengths(3, 0.5, 8),
    context=1200,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Turn:
    question: list[int]
    answer: list[int]
    pause_s: float  # after the answer before it


@dataclass(slots=True, eq=False)
class Session:
    """A user who asks one question after the other."""

    number: int
    kind: str
    begins: float
    opening: list[int]  # system prompt, and the document if there is one
    turns: list[Turn]

    def prompt(self, turn: int, answers: list[list[int]]) -> list[int]:
        """The opening, the earlier turns and the question."""
        tokens = list(self.opening)
        for earlier, answer in zip(self.turns[:turn], answers[:turn], strict=True):
            tokens += earlier.question
            tokens += answer
        return tokens + self.turns[turn].question


def make_trace(seed: int, arrivals: Arrivals, seconds: float, mix: Mix) -> list[Session]:
    """Sessions in the order of their start."""
    times = arrivals.times(np.random.default_rng([seed, 1]), seconds)
    writer = _SessionWriter(seed, mix)
    return [writer.session(number, begins) for number, begins in enumerate(times)]


@cache
def requests_per_session(mix: Mix) -> float:
    """Mean number of requests; simulated, because sessions end early if their context is full."""
    writer = _SessionWriter(0, mix)
    return float(np.mean([len(writer.session(number, 0.0).turns) for number in range(2000)]))


class _SessionWriter:
    """Writes sessions, each with its own random generator."""

    def __init__(self, seed: int, mix: Mix) -> None:
        self.seed, self.mix = seed, mix
        random = np.random.default_rng([seed, 2])
        self.systems = [_tokens(random, mix.system.draw(random)) for _ in range(mix.applications)]
        self.documents = [_tokens(random, mix.document.draw(random)) for _ in range(mix.documents)]

    def session(self, number: int, begins: float) -> Session:
        mix, random = self.mix, np.random.default_rng([self.seed, 3, number])
        opening = list(self._popular(random, self.systems))
        kind = random.random()
        if kind < mix.chats:
            name, count = "chat", int(random.geometric(1 / mix.turns))
        elif kind < mix.chats + mix.asked_documents:
            name, count = "document", int(random.geometric(0.5))
            opening += self._popular(random, self.documents)
        else:
            name, count = "single", 1
        turns = list(self._turns(random, count, mix.context - len(opening)))
        return Session(number, name, begins, opening, turns)

    def _popular(self, random: Generator, texts: list[list[int]]) -> list[int]:
        cumulative = _zipf(len(texts), self.mix.popularity)
        return texts[min(int(np.searchsorted(cumulative, random.random())), len(texts) - 1)]

    def _turns(self, random: Generator, count: int, space: int) -> Iterator[Turn]:
        mix = self.mix
        for number in range(count):
            question = _tokens(random, mix.question.draw(random))
            answer = _tokens(random, mix.answer.draw(random))
            pause = mix.pause.draw(random)
            space -= len(question) + len(answer)
            if space < 0 and number:
                return
            yield Turn(question, answer, float(pause))


def _tokens(random: Generator, count: int) -> list[int]:
    return list((LOWEST_TOKEN + random.integers(0, NUM_TOKENS, count)).tolist())


@cache
def _zipf(count: int, exponent: float) -> Any:
    """Cumulative shares."""
    shares = np.arange(1, count + 1) ** -exponent
    return np.cumsum(shares / shares.sum())
