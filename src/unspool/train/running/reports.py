"""Listeners that pass a training on to other programs, if they are installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from unspool.errors import SettingsError
from unspool.train.running.events import Ended, Event, Judged, Logged, Sampled
from unspool.train.running.runs import Run

Listener = Callable[[Event], None]


def reporters(names: Sequence[str], run: Run) -> list[Listener]:
    """A listener for each name: tensorboard, wandb or trackio."""
    known = {"tensorboard": _tensorboard, "wandb": _tracker, "trackio": _tracker}
    for name in names:
        if name not in known:
            raise SettingsError(f"there is no report to {name!r}; there are {', '.join(known)}")
    try:
        return [known[name](name, run) for name in names]
    except ImportError as error:
        missing = error.name or names[0]
        raise SettingsError(f"{missing} is not installed: pip install {missing}") from None


def _figures(event: Event) -> dict[str, float]:
    if isinstance(event, Logged):
        return {
            "loss": event.loss, "lr": event.lr, "grad_norm": event.grad_norm,
            "tokens": event.tokens, "tokens_per_second": event.tokens_per_second, **event.extra,
        }  # fmt: skip
    if isinstance(event, Judged):
        bits = {} if event.bits_per_byte is None else {"bits_per_byte": event.bits_per_byte}
        return {"held_out_loss": event.held_out_loss, **bits}
    return {}


def _tensorboard(name: str, run: Run) -> Listener:
    import_module("tensorboard")
    writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(
        str(run.folder / "tensorboard")
    )

    def listen(event: Event) -> None:
        for key, value in _figures(event).items():
            writer.add_scalar(key, value, getattr(event, "step", 0))
        if isinstance(event, Sampled):
            writer.add_text("sample", event.prompt + event.text, event.step)
        if isinstance(event, Ended):
            writer.close()

    return listen


def _tracker(name: str, run: Run) -> Listener:
    """Weights & Biases, and trackio, which takes the same calls."""
    module: Any = import_module(name)
    module.init(project="unspool", name=run.name, config=run.facts.get("settings", {}))

    def listen(event: Event) -> None:
        if figures := _figures(event):
            module.log(figures, step=getattr(event, "step", 0))
        if isinstance(event, Ended):
            module.finish()

    return listen
