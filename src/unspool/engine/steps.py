"""What a generation is made of: steps, one a token, each with what led to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from unspool.sampling.records import Draw, StageReport
from unspool.sampling.settings import SamplingSettings


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token the model weighed at one place."""

    token: int
    text: str
    logprob: float  # by the model itself
    probability: float  # in the distribution that was drawn from; 0 if a stage removed it


@dataclass(frozen=True, slots=True)
class Step:
    """One token, and how it came to be picked.

    `text` is what could be shown once this token was there: it may hold characters that earlier
    tokens had begun, and is empty while a character or a possible stop string is unfinished. The
    texts of all steps joined are the text of the generation. `bytes` is this token's own share.
    """

    token: int
    bytes: bytes
    text: str
    logprob: float  # of this token, by the model itself, before any sampling stage
    rank: int  # 0: the likeliest
    entropy: float  # of the model's distribution, in nats: how unsure it was
    probability: float  # of this token in the distribution that was drawn from
    position: int  # where it stands in the whole text, prompt included
    draw: Draw | None  # the number drawn and the interval it fell in; None if greedy
    candidates: tuple[Candidate, ...] = ()  # the likeliest, as many as asked for
    stages: tuple[StageReport, ...] = ()  # what each sampling stage did, if asked for
    seconds: float = 0.0  # from the step before (or the start) to this token
    finish_reason: str | None = None  # on the last step

    def to_dict(self) -> dict[str, Any]:
        """For JSON; bytes as a list of numbers."""
        return {**asdict(self), "bytes": list(self.bytes)}


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and time that a generation took."""

    prompt_tokens: int
    completion_tokens: int
    first_token_seconds: float
    total_seconds: float

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def tokens_per_second(self) -> float:
        """Speed after the first token, which also waits for the prompt."""
        writing = self.total_seconds - self.first_token_seconds
        return (self.completion_tokens - 1) / writing if writing > 0 else 0.0


@dataclass(slots=True)
class Generation:
    """A finished (or interrupted) piece of writing."""

    prompt: tuple[int, ...]
    settings: SamplingSettings
    steps: list[Step] = field(default_factory=list)
    empty_reason: str | None = None  # why there is not a single token

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.steps)

    @property
    def tokens(self) -> list[int]:
        """The new tokens, an end token included."""
        return [step.token for step in self.steps]

    @property
    def finish_reason(self) -> str:
        """`stop` (end token or stop string), `length`, `context`, or `interrupted`."""
        last = self.steps[-1].finish_reason if self.steps else self.empty_reason
        return last or "interrupted"

    @property
    def logprob(self) -> float:
        """Log-probability of the new text by the model itself: the chain rule."""
        return math.fsum(step.logprob for step in self.steps)

    @property
    def seed(self) -> int:
        return self.settings.seed

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.steps),
            first_token_seconds=self.steps[0].seconds if self.steps else 0.0,
            total_seconds=sum(step.seconds for step in self.steps),
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON: everything but the single steps."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "logprob": self.logprob,
            "seed": self.seed,
            "usage": {**asdict(self.usage), "total_tokens": self.usage.total_tokens},
        }

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class TokenScore:
    """How well the model saw one token of a given text coming."""

    token: int
    text: str
    logprob: float | None  # None for a first token with nothing before it
    rank: int | None
    entropy: float | None
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """A given text, token by token, as the model judges it."""

    positions: Sequence[TokenScore]

    @property
    def tokens(self) -> list[int]:
        return [position.token for position in self.positions]

    @property
    def logprobs(self) -> list[float | None]:
        """Of each token given those before it; None where nothing stands before."""
        return [position.logprob for position in self.positions]

    @property
    def total(self) -> float:
        """Log-probability of the whole text."""
        return math.fsum(self._known)

    @property
    def perplexity(self) -> float:
        """How many equally likely tokens the model felt it was choosing from, on average."""
        known = self._known
        return math.exp(-math.fsum(known) / len(known)) if known else math.nan

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        positions = [asdict(position) for position in self.positions]
        return {"total": self.total, "perplexity": self.perplexity, "positions": positions}

    @property
    def _known(self) -> list[float]:
        return [logprob for logprob in self.logprobs if logprob is not None]
