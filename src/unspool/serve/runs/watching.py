"""Events of a training run, from the files in its folder.

The training process writes files and knows nothing of watchers; the files are polled twice a
second. Event `run` has the run's current state, `log` and `samples` have new lines and the index
of the next one, and `done` is sent when the run can no longer change.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.serve.http.errors import ApiError
from unspool.serve.http.events import event
from unspool.serve.http.threads import in_thread
from unspool.serve.runs.run_json import downsample, run_json
from unspool.serve.runs.trainer import ACTIVE, ServerTrainer
from unspool.train.running.runs import Run

_POLL_SECONDS = 0.5


@dataclass(slots=True)
class Watcher:
    """How much of a run a client has received."""

    log: int = 0  # lines
    samples: int = 0
    _run_json: dict[str, Any] | None = None
    _stamps: tuple[tuple[int, ...], ...] = ()
    _log_file: int | None = None

    def poll(self, run: Run, trainer: ServerTrainer) -> tuple[bytes, bool]:
        """New events, and whether they are the last."""
        # Read before the files: what they hold then is final.
        is_over = not trainer.trains(run.name) and run.state not in ACTIVE
        events = b""
        stamps = tuple(_stamp(run.folder / name) for name in _FILES)
        if stamps != self._stamps:
            self._stamps = stamps
            events += self._new_lines(run, stamps[0])
        current = run_json(run, trainer.fault(run.name))
        if current != self._run_json:
            self._run_json = current
            events = event(current, "run") + events
        return events, is_over

    def _new_lines(self, run: Run, stamp: tuple[int, ...]) -> bytes:
        events = b""
        inode = stamp[0] if stamp else None
        is_new = self._log_file is not None and inode != self._log_file
        self._log_file = inode
        log = run.log()
        if is_new or len(log) < self.log:  # resumed: lines were removed
            self.log = self.samples = 0
        if new := log[self.log :]:
            first, self.log = self.log, len(log)
            lines = {"from": first, "next": self.log, "lines": downsample(new)}
            events += event(lines, "log")
        if samples := run.samples(self.samples):
            first, self.samples = self.samples, self.samples + len(samples)
            events += event({"from": first, "next": self.samples, "lines": samples}, "samples")
        return events


_FILES = ("log.jsonl", "samples.jsonl")


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except OSError:
        return ()
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)


async def watch(
    name: str, trainer: ServerTrainer, watcher: Watcher, is_stopping: Callable[[], bool]
) -> AsyncGenerator[bytes, None]:
    """Yield events until the run is over or the server stops."""
    while not is_stopping():
        run = await in_thread(find_run, name, trainer)
        if run is not None:
            events, is_over = await in_thread(watcher.poll, run, trainer)
            if events:
                yield events
            if is_over:
                yield event({"name": run.name}, "done")
                return
        await asyncio.sleep(_POLL_SECONDS)


def find_run(name: str, trainer: ServerTrainer) -> Run | None:
    """The run; None while it is starting. Raises 400 with the reason if its process failed."""
    is_starting, fault = trainer.trains(name), trainer.fault(name)
    try:
        return trainer.runs.get(name)
    except ApiError:
        if fault is not None:
            raise ApiError(400, fault, code="training_failed") from None
        if not is_starting:
            raise
    return None
