"""Going on after a process was lost: torchrun starts all of them anew, with the same command.

    torchrun --max-restarts 3 --nproc-per-node 8 -m unspool train books/ --depth 20 --shard

The second time the command is to go on with the run that it began the first time, not to begin
another one. A run therefore remembers which job began it and what was asked for; the same job that
asks for the same finds it, if it is not finished.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.model.run_folder import runs_folder
from unspool.train.running.runs import Run, RunError, began

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from unspool.train.running.parallel import Parallel


def job_facts(asked: DataclassInstance) -> dict[str, Any]:
    """What a run remembers of the job that began it; nothing without torchrun."""
    job = _job()
    return {} if job is None else {"job": {"id": job, "asked": _plain(asked)}}


def begun_before(asked: DataclassInstance) -> Run | None:
    """The run that this job began in an earlier life, to be gone on with."""
    job = _job()
    if job is None:
        return None
    wanted = {"id": job, "asked": _plain(asked)}
    for run in Run.all(runs_folder()):
        if run.facts.get("job") == wanted and run.state != "done":
            return run
    return None


def _job() -> str | None:
    """The job's name: what was given as --rdzv-id, or the very torchrun process."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None or name != "none":
        return name
    parent = os.getppid()
    return f"{socket.gethostname()} {parent} {began(parent)}"


def _plain(asked: DataclassInstance) -> Any:
    """As it is when it comes back from a file."""
    return json.loads(json.dumps(asdict(asked)))


def seen_by_all(folder: Path | None, parallel: Parallel) -> Run:
    """The run that the first process names, on all of them."""
    path = Path(parallel.told("" if folder is None else str(folder.resolve())))
    with parallel.agreed():
        if not (path / "run.json").exists():
            raise RunError(
                f"{socket.gethostname()} does not see {path}: set UNSPOOL_RUNS to a folder on a "
                "disk that all machines share"
            )
    return Run(folder if folder is not None else path)
