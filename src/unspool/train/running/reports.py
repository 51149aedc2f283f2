"""Listeners that pass a training on to other programs, if they are installed."""

from __future__ import annotations

import atexit
import re
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
    return [_opened(known[name], name, run) for name in names]


def _opened(make: Callable[[str, Run], Listener], name: str, run: Run) -> Listener:
    try:
        return make(name, run)
    except ImportError as error:
        missing = error.name or name
        raise SettingsError(f"{missing} is not installed: pip install {missing}") from None
    except Exception as error:  # each has errors of its own: no key, no network
        why = str(error).strip().splitlines() or [repr(error)]
        raise SettingsError(f"the report to {name} cannot be opened: {why[0]}") from error


def all_of(*listeners: Listener) -> Listener:
    """One that tells several."""

    def listen(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return listen


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
    # A run that goes on from a checkpoint computes the steps behind it again.
    saved = run.resumable()
    writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(
        str(run.folder / "tensorboard"), purge_step=None if saved is None else saved.step + 1
    )
    atexit.register(writer.close)  # also where training ends with an error

    def listen(event: Event) -> None:
        for key, value in _figures(event).items():
            writer.add_scalar(key, value, getattr(event, "step", 0))
        if isinstance(event, Sampled):
            writer.add_text("sample", event.prompt + event.text, event.step)
        if isinstance(event, Ended):
            writer.flush()

    return listen


def _tracker(name: str, run: Run) -> Listener:
    """Weights & Biases, and trackio, which takes the same calls."""
    module: Any = import_module(name)
    facts = run.facts
    wanted = {
        "project": "unspool", "name": run.name, "config": facts.get("settings", {}),
        "resume": "allow",  # the same one, where a run goes on
    }  # fmt: skip
    if name == "wandb":  # which finds it by an id; letters that one may not have are left out
        wanted["id"] = re.sub(r"[^\w-]", "", f"{run.name}-{facts.get('started', '')}")
    module.init(**wanted)

    def listen(event: Event) -> None:
        if figures := _figures(event):
            module.log(figures, step=getattr(event, "step", 0))
        if isinstance(event, Ended):
            module.finish()

    return listen
