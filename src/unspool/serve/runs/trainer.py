"""Training started by this server: `unspool train` as a child process, one at a time.

The process has its own session: it survives the server and Ctrl-C in the server's terminal. All
its state is in its run folder, so a server that is started later lists it and can pause or stop it.
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
from unspool.serve.core.state import ServerState
from unspool.serve.http.errors import ApiError
from unspool.serve.runs.library import RunLibrary, run_library

ACTIVE = ("running", "paused")
_OUTPUT_BYTES = 2000  # of a failed process that are read for its message


def server_trainer(state: ServerState) -> ServerTrainer:
    """The trainer of a server."""
    return state.extension("trainer", lambda: ServerTrainer(run_library(state)))


class ServerTrainer:
    """Starts training processes, and knows the last one."""

    def __init__(self, runs: RunLibrary) -> None:
        self.runs = runs
        self.name: str | None = None  # of the last run started
        self._starting = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "unspool", "train"]

    def trains(self, name: str | None) -> bool:
        """Whether the process for this run was started here and has not ended."""
        is_alive = self._process is not None and self._process.poll() is None
        return is_alive and name == self.name

    def check_free(self) -> None:
        """Raise 409 if a run is active: two would share the cores and both be slow."""
        active = [run.name for run in self.runs.all() if run.state in ACTIVE]
        if self.name is not None and self.trains(self.name):
            active.append(self.name)
        if active:
            message = f"{active[0]} is being trained; stop it, or wait until it is done"
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
        """Start or resume the run of this name."""
        with self._starting:
            self.check_free()
            try:
                self._start(name, options)
            except OSError as error:
                raise ApiError(500, f"cannot start the training process: {error}") from None

    def _start(self, name: str, options: Sequence[str]) -> None:
        self.runs.root.mkdir(parents=True, exist_ok=True)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  read when the process has ended
        self._process = subprocess.Popen(
            [*self.command, *options],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "UNSPOOL_RUNS": str(self.runs.root)},
        )
        self.name = name
        # Reap the process when it ends; else it stays a zombie.
        Thread(target=self._process.wait, daemon=True).start()

    def fault(self, name: str) -> str | None:
        """Why the process of this run failed; None if it did not."""
        if name != self.name or self._process is None or not self._process.poll():
            return None
        lines = [line for line in self._read_output().splitlines() if line.strip()]
        last = lines[-1].strip().removeprefix("unspool: ") if lines else "no output"
        return f"the training ended with status {self._process.returncode}: {last}"

    def _read_output(self) -> str:
        assert self._output is not None
        size = self._output.seek(0, 2)
        self._output.seek(max(0, size - _OUTPUT_BYTES))
        return self._output.read().decode("utf-8", "replace")
