"""Run jobs in parallel, each in its own process.

No process pool: its workers would outlive a parent that is killed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from unspool.errors import UnspoolError

Job = TypeVar("Job")


def run_in_processes(
    jobs: Sequence[Job], work: Callable[[Job], float], at_once: int
) -> Iterator[tuple[Job, float]]:
    """Yield each job with its result as it ends. The first failure terminates the others."""
    context = get_context("spawn")
    pending, active = deque(jobs), dict[Any, tuple[Any, Job]]()
    try:
        while pending or active:
            while pending and len(active) < at_once:
                job = pending.popleft()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run_job, args=(sender, work, job), daemon=True)
                process.start()
                sender.close()  # so that the pipe closes when the process ends for any reason
                active[receiver] = process, job
            for ready in wait(list(active)):
                process, job = active.pop(ready)
                yield job, _receive(ready, process)
    finally:
        for process, _ in active.values():
            process.terminate()
        for process, _ in active.values():
            process.join()


def is_orphaned() -> bool:
    """Whether the parent of this process has died."""
    parent = parent_process()
    return parent is not None and not parent.is_alive()


def _run_job(pipe: Connection, work: Callable[[Any], float], job: Any) -> None:
    try:
        result: float | Exception = work(job)
    except Exception as error:
        result = error
    with suppress(BrokenPipeError):  # the parent has died
        pipe.send(result)


def _receive(receiver: Any, process: Any) -> float:
    try:
        result = receiver.recv()
    except EOFError:
        process.join()
        raise UnspoolError(
            f"a run's process exited with {process.exitcode} before it had a result; rerun the "
            "same command to resume from its last checkpoint"
        ) from None
    process.join()
    if isinstance(result, Exception):
        raise result
    return float(result)
