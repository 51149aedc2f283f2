"""Telling whoever watches a run what is new in its folder.

The process that trains knows nothing of its watchers: it writes files, and these are looked at
twice a second. An event `run` says what the run is now, `log` and `samples` bring lines, and the
number of the next one; `done` ends it, when the run will not change any more.
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
from unspool.serve.runs.run_json import drawable, run_json
from unspool.serve.runs.trainer import GOING, Trainer
from unspool.train.running.runs import Run

_LOOK_SECONDS = 0.5


@dataclass(slots=True)
class Watcher:
    """How much of a run somebody has been told."""

    log: int = 0  # lines
    samples: int = 0
    _told: dict[str, Any] | None = None
    _stamps: tuple[tuple[int, ...], ...] = ()
    _log_file: int | None = None

    def look(self, run: Run, trainer: Trainer) -> tuple[bytes, bool]:
        """What is new, as events; and whether nothing more will come."""
        # First: what is read behind it is then the last.
        is_over = not trainer.trains(run.name) and run.state not in GOING
        found = b""
        stamps = tuple(_stamp(run.folder / name) for name in _FILES)
        if stamps != self._stamps:
            self._stamps = stamps
            found += self._lines(run, stamps[0])
        told = run_json(run, trainer.fault(run.name))
        if told != self._told:
            self._told = told
            found = event(told, "run") + found
        return found, is_over

    def _lines(self, run: Run, stamp: tuple[int, ...]) -> bytes:
        found = b""
        inode = stamp[0] if stamp else None
        is_new = self._log_file is not None and inode != self._log_file
        self._log_file = inode
        log = run.log()
        if is_new or len(log) < self.log:  # resumed: lines were taken back
            self.log = self.samples = 0
        if new := log[self.log :]:
            first, self.log = self.log, len(log)
            lines = {"from": first, "next": self.log, "lines": drawable(new)}
            found += event(lines, "log")
        if samples := run.samples(self.samples):
            first, self.samples = self.samples, self.samples + len(samples)
            found += event({"from": first, "next": self.samples, "lines": samples}, "samples")
        return found


_FILES = ("log.jsonl", "samples.jsonl")


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except OSError:
        return ()
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)


async def watch(
    name: str, trainer: Trainer, watcher: Watcher, is_stopping: Callable[[], bool]
) -> AsyncGenerator[bytes, None]:
    """Events until the run is over."""
    while not is_stopping():
        run = await in_thread(find_run, name, trainer)
        if run is not None:
            events, is_over = await in_thread(watcher.look, run, trainer)
            if events:
                yield events
            if is_over:
                yield event({"name": run.name}, "done")
                return
        await asyncio.sleep(_LOOK_SECONDS)


def find_run(name: str, trainer: Trainer) -> Run | None:
    """The run; None while it is starting. Raises if it could not begin, with the reason."""
    is_starting, fault = trainer.trains(name), trainer.fault(name)
    try:
        return trainer.runs.get(name)
    except ApiError:
        if fault is not None:
            raise ApiError(400, fault, code="training_failed") from None
        if not is_starting:
            raise
    return None


def run_error(error: ApiError) -> bytes:
    """The last event of a stream that cannot go on."""
    return event(error.openai(), "error")
