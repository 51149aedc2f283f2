"""What a training tells on its way: the terminal, the log and the page listen."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Logged:
    """One step, as it stands in log.jsonl."""

    step: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds: float
    memory: int | None = None  # bytes on the GPU at most
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judged:
    step: int
    held_out_loss: float
    bits_per_byte: float | None


@dataclass(frozen=True, slots=True)
class Sampled:
    step: int
    prompt: str
    seed: int
    text: str


@dataclass(frozen=True, slots=True)
class Saved:
    step: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Paused:
    step: int


@dataclass(frozen=True, slots=True)
class Replanned:
    """The run gets another number of steps, so that it keeps to its time budget."""

    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class Ended:
    state: str  # "done" or "stopped"
    step: int
    early: bool = False  # done before its last step: the held-out loss stopped improving


Event = Logged | Judged | Sampled | Saved | Paused | Replanned | Ended
