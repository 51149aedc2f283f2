"""A request, and what becomes of it in a fleet."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["", "finished", "refused", "lost"]


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, the answer that will be written, and when what happened. Times are in seconds
    since the beginning; below zero: not yet."""

    number: int
    prompt: list[int]
    answer: list[int]
    arrival: float
    session: int = -1
    turn: int = 0
    outcome: Outcome = ""
    first: float = -1.0  # when the reader had the first token
    last: float = -1.0  # ... the latest one
    delivered: int = 0  # tokens that the reader has
    attempts: int = 0
    replica: str = ""  # where it was sent last
    cached: int = 0  # tokens of the prompt that were found computed, as the server tells it
    computed: int = 0  # tokens of the prompt that were run, all attempts together
    gaps: array[float] = field(default_factory=lambda: array("d"))  # s between tokens

    @property
    def first_token_s(self) -> float:
        return self.first - self.arrival

    def deliver(self, count: int, now: float) -> None:
        """The reader is to have so many tokens by now. Those of an earlier attempt are the same
        (same seed, same text), so only what is beyond them is new."""
        if count <= self.delivered:
            return
        self.delivered = count
        if self.first < 0:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now

    def end(self, outcome: Outcome) -> None:
        if self.outcome:
            raise AssertionError(f"request {self.number} ended twice: {self.outcome}, {outcome}")
        self.outcome = outcome
