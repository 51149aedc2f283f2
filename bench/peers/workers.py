"""The driver's end of the protocol: start a worker, ask it, keep it still between its turns."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

START_S = 300.0  # loading, and compiling graphs where an engine does
JOB_S = 900.0


class WorkerError(Exception):
    """An engine could not do what it was asked."""


class Worker:
    """One engine in a process of its own.

    Threads of an idle engine may spin and take time from the one that is measured, so that a
    worker is stopped by a signal except while it has a job.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `close`
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said,
            env=environment,
        )  # fmt: skip
        self._heard = b""
        try:
            ready = self._hear(START_S)
        except BaseException:
            self.close()
            raise
        self.engine: str = ready["engine"]
        self.weights: str | None = ready["weights"]
        self.load_s: float = ready["load_s"]
        self.weight_bytes: int = ready["weight_bytes"]
        self._signal(signal.SIGSTOP)

    def ask(self, **job: Any) -> dict[str, Any]:
        """Wake the worker for one job."""
        self._signal(signal.SIGCONT)
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
            found = self._hear(JOB_S)
        except BrokenPipeError:
            raise WorkerError(self._last_words()) from None
        finally:
            self._signal(signal.SIGSTOP)
        if "error" in found:
            raise WorkerError(found["error"])
        return found

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self.process.poll() is None:
            self.process.kill()  # works on a stopped process too
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.said):
            with suppress(OSError):  # what it never read is lost with it
                if pipe is not None:
                    pipe.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def _hear(self, patience: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        pipe, until = self.process.stdout.fileno(), time.monotonic() + patience
        while b"\n" not in self._heard:
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                raise WorkerError(f"gave no answer within {patience:.0f} s")
            more = os.read(pipe, 1 << 20)
            if not more:
                raise WorkerError(self._last_words())
            self._heard += more
        line, self._heard = self._heard.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def _last_words(self) -> str:
        """Why it died, from what it wrote to stderr."""
        code = self.process.wait()
        self.said.seek(0)
        lines = self.said.read().decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1].strip() if lines else "it said nothing"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"ended with {how}: {reason[:300]}"


def cold_start(command: Sequence[str], environment: dict[str, str]) -> float:
    """Seconds from starting a process to the first byte that it writes."""
    with tempfile.TemporaryFile() as said:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, env=environment
        )
        try:
            assert process.stdout is not None
            first = os.read(process.stdout.fileno(), 1)
            taken = time.perf_counter() - began
            process.stdout.read()
            if process.wait() or not first:
                said.seek(0)
                lines = said.read().decode("utf-8", "replace").strip().splitlines()
                raise WorkerError(lines[-1][:300] if lines else "wrote nothing")
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    return taken
