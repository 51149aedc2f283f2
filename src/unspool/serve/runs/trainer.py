"""The training that this server starts: `unspool train` as a process of its own, one at a time.

It does not end with the server, nor by Ctrl-C in the server's terminal: it has a session of its
own, and all that is known of it is in its run folder. A server that is started later finds it
there, shows it, and can pause and stop it as well. So nothing is left behind unseen.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from threading import Lock, Thread
from typing import IO

from unspool.errors import DataError, UnspoolError
from unspool.serve.http.errors import ApiError
from unspool.serve.runs.library import RunLibrary

GOING = ("running", "paused")
_TOLD = 2000  # bytes of what a process has said at last


class Trainer:
    """The process, from its start until its run can be read from the disk."""

    def __init__(self, runs: RunLibrary) -> None:
        self.runs = runs
        self.name: str | None = None  # of the run that was started last
        self._starting = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "unspool", "train"]

    def trains(self, name: str | None) -> bool:
        """Whether the process for this run was started here and has not ended."""
        is_going = self._process is not None and self._process.poll() is None
        return is_going and name == self.name

    def check_free(self) -> None:
        """Trainings share the cores: a second one would only make both slow."""
        going = [run.name for run in self.runs.all() if run.state in GOING]
        if self.name is not None and self.trains(self.name):
            going.append(self.name)
        if going:
            message = f"{going[0]} is being trained; stop it, or wait until it is done"
            raise ApiError(409, message, code="training_busy")

    @staticmethod
    def check_source(source: str) -> None:
        """Raise if there is no such data. The default data set is downloaded here, so that an
        unreachable network is an error; a data set of the hub is downloaded by the training."""
        from unspool.train.data.sources import DEFAULT_SOURCE, source_files

        try:
            source_files(source, offline=True)
        except DataError:
            raise
        except UnspoolError:  # not on this machine yet
            if source in (DEFAULT_SOURCE, "default"):
                source_files(source)

    def start(self, name: str, options: Sequence[str]) -> None:
        """Start a run of this name, or go on with it."""
        with self._starting:
            self.check_free()
            try:
                self._start(name, options)
            except OSError as error:
                raise ApiError(500, f"the training cannot be started: {error}") from None

    def _start(self, name: str, options: Sequence[str]) -> None:
        self.runs.root.mkdir(parents=True, exist_ok=True)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  read when it has ended
        self._process = subprocess.Popen(
            [*self.command, *options],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "UNSPOOL_RUNS": str(self.runs.root)},
        )
        self.name = name
        # Somebody must ask how it ended, or it would stay in the list of processes.
        Thread(target=self._process.wait, daemon=True).start()

    def fault(self, name: str) -> str | None:
        """Why the process that was started for a run has failed, if it has."""
        if name != self.name or self._process is None or not self._process.poll():
            return None
        lines = [line for line in self._words().splitlines() if line.strip()]
        last = lines[-1].strip().removeprefix("unspool: ") if lines else "it said nothing"
        return f"the training ended with status {self._process.returncode}: {last}"

    def _words(self) -> str:
        assert self._said is not None
        size = self._said.seek(0, 2)
        self._said.seek(max(0, size - _TOLD))
        return self._said.read().decode("utf-8", "replace")
