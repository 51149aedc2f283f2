"""Events of a training run, for listeners such as the terminal, the log and the web page."""

from __future__ import annotations

import atexit
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from unspool.errors import SettingsError
from unspool.train.running.runs import Run


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


Listener = Callable[[Event], None]


def reporters(names: Sequence[str], run: Run) -> list[Listener]:
    """Open a listener for each name: tensorboard, wandb or trackio."""
    trackers = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _wandb}
    for name in names:
        if name not in trackers:
            raise SettingsError(f"unknown report {name!r}; choose from {', '.join(trackers)}")
    return [_open_tracker(trackers[name], name, run) for name in names]


def _open_tracker(make: Callable[[str, Run], Listener], name: str, run: Run) -> Listener:
    try:
        return make(name, run)
    except ImportError as error:
        missing = error.name or name
        raise SettingsError(f"{missing} is not installed: pip install {missing}") from None
    except Exception as error:  # no key, no network: each library has its own errors
        reason = str(error).strip().splitlines() or [repr(error)]
        raise SettingsError(f"cannot report to {name}: {reason[0]}") from error


def combine_listeners(*listeners: Listener) -> Listener:
    """A listener that passes events on to several."""

    def listen(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return listen


def _figures(event: Event) -> dict[str, float]:
    if isinstance(event, StepLogged):
        return {
            "loss": event.loss, "lr": event.lr, "grad_norm": event.grad_norm,
            "tokens": event.tokens, "tokens_per_second": event.tokens_per_second, **event.extra,
        }  # fmt: skip
    if isinstance(event, Evaluated):
        bits = {} if event.bits_per_byte is None else {"bits_per_byte": event.bits_per_byte}
        return {"held_out_loss": event.held_out_loss, **bits}
    return {}


def _tensorboard(name: str, run: Run) -> Listener:
    import_module("tensorboard")
    # A resumed run computes the steps after its checkpoint again.
    checkpoint = run.resumable_checkpoint()
    writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(
        str(run.folder / "tensorboard"),
        purge_step=None if checkpoint is None else checkpoint.step + 1,
    )
    atexit.register(writer.close)  # also after an error

    def listen(event: Event) -> None:
        for key, value in _figures(event).items():
            writer.add_scalar(key, value, getattr(event, "step", 0))
        if isinstance(event, SampleWritten):
            writer.add_text("sample", event.prompt + event.text, event.step)
        if isinstance(event, RunEnded):
            writer.flush()

    return listen


def _wandb(name: str, run: Run) -> Listener:
    """Weights & Biases, or trackio, which has the same API."""
    module: Any = import_module(name)
    facts = run.facts
    options = {
        "project": "unspool", "name": run.name, "config": facts.get("settings", {}),
        "resume": "allow",  # a resumed run continues its old record
    }  # fmt: skip
    if name == "wandb":  # finds the record by an id without special characters
        options["id"] = re.sub(r"[^\w-]", "", f"{run.name}-{facts.get('started', '')}")
    module.init(**options)

    def listen(event: Event) -> None:
        if figures := _figures(event):
            module.log(figures, step=getattr(event, "step", 0))
        if isinstance(event, RunEnded):
            module.finish()

    return listen
