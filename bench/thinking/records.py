"""What was written, kept as lines of JSON: a run that is broken off goes on where it stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One whole text, without its words."""

    tokens: int
    logprob: float  # a token on average
    right: bool
    score: float  # what the exact check gave
    answer: str | None = None
    certainty: float | None = None  # None: nobody asked


@dataclass(frozen=True)
class Drawn:
    """The samples of one problem."""

    id: str
    prompt: int  # tokens of it
    samples: list[Sample]
    greedy: Sample
    text: str = ""  # the first one, to look at

    @classmethod
    def of(cls, row: dict[str, Any]) -> Drawn:
        samples = [Sample(**one) for one in row["samples"]]
        return cls(row["id"], row["prompt"], samples, Sample(**row["greedy"]), row["text"])


@dataclass(frozen=True)
class Searched:
    """What one search came to."""

    id: str
    policy: str  # with its judge: "beam by log-probability"
    n: int  # its budget: what so many samples of this problem cost
    budget: int  # ... in tokens, the prompt included
    spent: int  # tokens written and judged
    right: bool
    error: str = ""
    text: str = field(default="", compare=False)


def append(file: Path, rows: Iterable[Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(asdict(row)) + "\n")


def drawn_in(file: Path) -> list[Drawn]:
    return [Drawn.of(row) for row in _rows(file)]


def searched_in(file: Path) -> list[Searched]:
    return [Searched(**row) for row in _rows(file)]


def _rows(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


# -- which of several samples a policy takes ---------------------------------------------------

Choice = Callable[[Sequence[Sample]], Sample | None]


def best_by(value: Callable[[Sample], float]) -> Choice:
    """Best of n: the highest score, of equals the likeliest, then the first."""

    def choose(samples: Sequence[Sample]) -> Sample | None:
        return max(samples, key=lambda one: (value(one), one.logprob))

    return choose


def vote_by(weight: Callable[[Sample], float] | None = None) -> Choice:
    """The answer with most votes; of equals the one with the likeliest text. Weights below zero
    count as e^weight, as `VoteVerifier` has it. None: no text has an answer."""

    def choose(samples: Sequence[Sample]) -> Sample | None:
        given = [1.0 if weight is None else weight(one) for one in samples]
        if min(given) < 0:
            given = [math.exp(one - max(given)) for one in given]
        votes: dict[Hashable, float] = {}
        for sample, own in zip(samples, given, strict=True):
            if sample.answer is not None:
                votes[sample.answer] = votes.get(sample.answer, 0.0) + own
        voting = [one for one in samples if one.answer is not None]
        return max(voting, key=lambda one: (votes[one.answer], one.logprob), default=None)

    return choose


def _certainty(sample: Sample) -> float:
    assert sample.certainty is not None
    return sample.certainty


# By name: the choice, whether it needs certainties (which are paid for), and whether it votes.
CHOICES: dict[str, tuple[Choice, bool, bool]] = {
    "best-of by the exact check": (best_by(lambda one: one.score), False, False),
    "best-of by log-probability": (best_by(lambda one: one.logprob), False, False),
    "best-of by certainty": (best_by(_certainty), True, False),
    "vote": (vote_by(), False, True),
    "vote weighed by log-probability": (vote_by(lambda one: one.logprob), False, True),
    "vote weighed by certainty": (vote_by(_certainty), True, True),
}
