"""Find the model of a training run, so that a run's name can be given as a model.

    find_run("mine")               runs/mine, if that is a run
    run_model(Path("runs/mine"))   its best checkpoint

The trainer writes these folders (`train/running/runs.py`); reading them needs no torch.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path

from unspool.errors import UnspoolError


def runs_folder() -> Path:
    """The folder that holds training runs: UNSPOOL_RUNS, or `runs` in the current folder."""
    return Path(os.environ.get("UNSPOOL_RUNS") or "runs").expanduser()


def find_run(name: str | Path) -> Path | None:
    """The folder of a training run, given by path or by its name among the runs."""
    path = Path(name).expanduser()
    candidates = [path, runs_folder() / path] if len(path.parts) == 1 else [path]
    with suppress(OSError, ValueError):  # a name that no file can have
        return next((folder for folder in candidates if (folder / "run.json").is_file()), None)
    return None


def run_model(folder: Path) -> Path | None:
    """The checkpoint of a run to generate with; None: there is none yet.

    A finished run names it (final.json). Otherwise it is the one with the lowest held-out loss, or
    the newest if none was evaluated.
    """
    with suppress(OSError, ValueError, TypeError, KeyError):
        final = json.loads((folder / "final.json").read_text(encoding="utf-8"))["checkpoint"]
        if (folder / "checkpoints" / Path(final).name).is_dir():
            return folder / "checkpoints" / Path(final).name
    newest = best = None
    best_loss = math.inf
    for path in sorted((folder / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name)):
        with suppress(OSError, ValueError, TypeError):  # it may be removed concurrently
            facts = json.loads((path / "training.json").read_text(encoding="utf-8"))
            loss = facts.get("held_out_loss")
            newest = path
            if loss is not None and float(loss) <= best_loss:
                best, best_loss = path, float(loss)
    return best or newest


def resolve_run(path: Path) -> Path:
    """The checkpoint to use if `path` is a run's folder, else `path` itself."""
    if not (path / "run.json").is_file():
        return path
    checkpoint = run_model(path)
    if checkpoint is None:
        raise UnspoolError(f"the run {path} has no checkpoint yet; wait for the first one")
    return checkpoint
