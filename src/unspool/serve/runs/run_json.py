"""Runs as JSON: what they are, how far they have come, and which checkpoints there are."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from unspool.train.running.runs import Run, film_steps

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
    """What is logged of the newest step, without reading all of the log."""
    found: list[dict[str, Any]] = []
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL))
        for line in file.read().rpartition(b"\n")[0].split(b"\n"):
            with suppress(ValueError):  # the first may be cut
                found.append(dict(json.loads(line)))
    return joined(found)[-1] if found else None


def joined(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a step: what was judged of it is logged apart."""
    found: dict[Any, dict[str, Any]] = {}
    for line in lines:
        found.setdefault(line.get("step"), {}).update(line)
    return list(found.values())


def drawable(lines: list[dict[str, Any]], most: int = MOST_LINES) -> list[dict[str, Any]]:
    """One line a step, and no more than can be drawn; those with a held-out loss, and the last,
    always stay."""
    lines = joined(lines)
    every = -(-len(lines) // most) if lines else 1
    last = len(lines) - 1
    return [
        line
        for number, line in enumerate(lines)
        if number % every == 0 or number == last or line.get("held_out_loss") is not None
    ]
