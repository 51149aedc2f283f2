"""Stand-in training functions whose losses follow a scaling law exactly, without torch."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from unspool.train.scaling.study import PlannedRun, Study, is_orphaned


def train(run: PlannedRun, folder: Path) -> float:
    """The loss of a run, and who trained it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "process").write_text(str(os.getpid()))
    return 1.5 + 400 / run.parameters**0.35 + 300 / run.tokens**0.3


def broken(run: PlannedRun, folder: Path) -> float:
    """One of them cannot be trained."""
    if run.depth == 3:
        raise ValueError(f"no {run.name} today")
    return train(run, folder)


def killed(run: PlannedRun, folder: Path) -> float:
    """A process that ends without a word."""
    os._exit(9)


def endless(run: PlannedRun, folder: Path) -> float:
    """Runs until its parent process dies."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "process").write_text(str(os.getpid()))
    while not is_orphaned():
        time.sleep(0.05)
    return 0.0


if __name__ == "__main__":  # a study to be killed
    runs = [PlannedRun(depth, 1, 1, 1.0) for depth in (1, 2)]
    Study(sys.argv[1]).measure(runs, endless, at_once=2)
