"""Resume after torchrun restarted all processes with the same command.

    torchrun --max-restarts 3 --nproc-per-node 8 -m unspool train books/ --depth 20 --shard

After a restart the command must resume the run that it started, not start another one. A run
therefore records its job id and the requested settings; the same job with the same settings finds
it again, if it is not done.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.model.run_folder import runs_folder
from unspool.train.running.runs import Run, RunError, process_start_time

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from unspool.train.running.parallel import Parallel


def job_facts(settings: DataclassInstance) -> dict[str, Any]:
    """The job entry of run.json; empty without torchrun."""
    job = _job_id()
    return {} if job is None else {"job": {"id": job, "asked": _as_json(settings)}}


def find_restarted_run(settings: DataclassInstance) -> Run | None:
    """The unfinished run that this job started before torchrun restarted it."""
    facts = job_facts(settings)
    if not facts:
        return None
    for run in Run.all(runs_folder()):
        if run.facts.get("job") == facts["job"] and run.state != "done":
            return run
    return None


def _job_id() -> str | None:
    """Id of the torchrun job: --rdzv-id, or the host and torchrun process."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None or name != "none":
        return name
    parent = os.getppid()
    return f"{socket.gethostname()} {parent} {process_start_time(parent)}"


def _as_json(settings: DataclassInstance) -> Any:
    """Settings as they look after a round trip through a file."""
    return json.loads(json.dumps(asdict(settings)))


def open_run_everywhere(folder: Path | None, parallel: Parallel) -> Run:
    """Open the first process's run in all processes; they must share the disk."""
    path = Path(parallel.broadcast_str("" if folder is None else str(folder.resolve())))
    with parallel.all_succeed():
        if not (path / "run.json").exists():
            raise RunError(
                f"{socket.gethostname()} cannot see {path}: set UNSPOOL_RUNS to a folder on a "
                "disk that all machines share"
            )
    return Run(folder if folder is not None else path)
