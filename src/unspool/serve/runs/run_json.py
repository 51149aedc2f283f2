"""Training runs as JSON: settings, progress and checkpoints."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from unspool.train.running.runs import Run, milestone_steps

MAX_LINES = 4000  # of a log in one response: more points than there are pixels
_TAIL_BYTES = 1 << 14  # always holds the last line of a log
_HIDDEN = ("pid", "pid_started")


def summary(run: Run, fault: str | None = None) -> dict[str, Any]:
    """A run in a list. `fault`: why its process failed, if this server started it."""
    facts = run.facts
    return {
        "name": run.name,
        "object": "training.run",
        "kind": facts.get("kind"),
        "state": run.state,
        "error": facts.get("error") or fault,
        "started": facts.get("started"),
        "steps": run.steps,
        "last": last_line(run.folder / "log.jsonl"),
    }


def run_json(run: Run, fault: str | None = None) -> dict[str, Any]:
    """A run without its log and samples."""
    facts = {name: value for name, value in run.facts.items() if name not in _HIDDEN}
    steps = run.steps
    film = milestone_steps(steps)
    checkpoints = [
        {
            "step": saved.step,
            "tokens": saved.tokens,
            "held_out_loss": saved.held_out_loss,
            "film": saved.step in film,
            "model": f"{run.name}@{saved.step}",
        }
        for saved in run.checkpoints()
    ]
    can_resume = run.resumable_checkpoint() is not None
    return {
        **summary(run, fault),
        "facts": facts,
        "checkpoints": checkpoints,
        "can_resume": can_resume,
    }


def last_line(path: Path) -> dict[str, Any] | None:
    """The newest step of a log, without reading all of it."""
    lines: list[dict[str, Any]] = []
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        for line in file.read().rpartition(b"\n")[0].split(b"\n"):
            with suppress(ValueError):  # the first may be incomplete
                lines.append(dict(json.loads(line)))
    return merge_by_step(lines)[-1] if lines else None


def merge_by_step(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each step; its evaluation is logged in a separate line."""
    by_step: dict[Any, dict[str, Any]] = {}
    for line in lines:
        by_step.setdefault(line.get("step"), {}).update(line)
    return list(by_step.values())


def downsample(lines: list[dict[str, Any]], max_lines: int = MAX_LINES) -> list[dict[str, Any]]:
    """One line for each step, and at most about `max_lines` of them: every n-th, those with a
    held-out loss, and the last."""
    lines = merge_by_step(lines)
    every = -(-len(lines) // max_lines) if lines else 1
    last = len(lines) - 1
    return [
        line
        for number, line in enumerate(lines)
        if number % every == 0 or number == last or line.get("held_out_loss") is not None
    ]
