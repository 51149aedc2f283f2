"""Events of a training run, for listeners such as the terminal, the log and the web page."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StepLogged:
    """One training step, as in log.jsonl."""

    step: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds: float
    memory: int | None = None  # peak GPU memory in bytes
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluated:
    step: int
    held_out_loss: float
    bits_per_byte: float | None


@dataclass(frozen=True, slots=True)
class SampleWritten:
    step: int
    prompt: str
    seed: int
    text: str


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    step: int
    folder: Path


@dataclass(frozen=True, slots=True)
class RunPaused:
    step: int


@dataclass(frozen=True, slots=True)
class StepsReplanned:
    """The number of steps changed, to stay within the time budget."""

    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class RunEnded:
    state: str  # "done" or "stopped"
    step: int
    early: bool = False  # done before its last step: the held-out loss stopped improving


Event = (
    StepLogged | Evaluated | SampleWritten | CheckpointSaved | RunPaused | StepsReplanned | RunEnded
)
