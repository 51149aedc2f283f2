"""Runs as JSON: what they are, how far they have come, and which checkpoints there are."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from unspool.train.runs import Run, film_steps

MOST_LINES = 4000  # of a log in one piece: more points than there are pixels
_TAIL = 1 << 14  # bytes in which the last line of a log surely stands
_HIDDEN = ("pid", "pid_started")


def summary(run: Run, fault: str | None = None) -> dict[str, Any]:
    """What a list of runs needs; `fault`: why its process has ended, if that is known here."""
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
    """All that its folder says of a run, but for the log and the samples."""
    facts = {name: value for name, value in run.facts.items() if name not in _HIDDEN}
    steps = run.steps
    film = film_steps(steps)
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
    can_resume = run.resumable() is not None
    head = summary(run, fault)
    return {**head, "facts": facts, "checkpoints": checkpoints, "can_resume": can_resume}


def last_line(path: Path) -> dict[str, Any] | None:
    """The newest whole line of a log, without reading all of it."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL))
        lines = file.read().rpartition(b"\n")[0].rsplit(b"\n", 1)
        found = json.loads(lines[-1])
        return found if isinstance(found, dict) else None
    return None


def thinned(lines: list[dict[str, Any]], most: int = MOST_LINES) -> list[dict[str, Any]]:
    """No more lines than can be drawn; those with a held-out loss, and the last, always stay."""
    every = -(-len(lines) // most) if lines else 1
    last = len(lines) - 1
    return [
        line
        for number, line in enumerate(lines)
        if number % every == 0 or number == last or line.get("held_out_loss") is not None
    ]
