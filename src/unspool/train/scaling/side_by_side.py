"""Several runs at once, each in a process of its own that ends with it.

No pool: its processes outlive a parent that is killed, waiting for work that never comes.
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


def side_by_side(
    jobs: Sequence[Job], work: Callable[[Job], float], at_once: int
) -> Iterator[tuple[Job, float]]:
    """Each job with what came out, as they end. The first that fails ends the others."""
    context = get_context("spawn")
    waiting, going = deque(jobs), dict[Any, tuple[Any, Job]]()
    try:
        while waiting or going:
            while waiting and len(going) < at_once:
                job = waiting.popleft()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_answer, args=(theirs, work, job), daemon=True)
                process.start()
                theirs.close()  # so that it is closed when the process ends, however that ends
                going[ours] = process, job
            for answered in wait(list(going)):
                process, job = going.pop(answered)
                yield job, _result(answered, process)
    finally:
        for process, _ in going.values():
            process.terminate()
        for process, _ in going.values():
            process.join()


def left_alone() -> bool:
    """Whether this process works for another one that is no more."""
    parent = parent_process()
    return parent is not None and not parent.is_alive()


def _answer(pipe: Connection, work: Callable[[Any], float], job: Any) -> None:
    try:
        found: float | Exception = work(job)
    except Exception as error:
        found = error
    with suppress(BrokenPipeError):  # nobody is there to hear it
        pipe.send(found)


def _result(answered: Any, process: Any) -> float:
    try:
        found = answered.recv()
    except EOFError:
        process.join()
        raise UnspoolError(
            f"a run's process ended with {process.exitcode} before it had a result; the same "
            "command goes on from its last checkpoint"
        ) from None
    process.join()
    if isinstance(found, Exception):
        raise found
    return float(found)
