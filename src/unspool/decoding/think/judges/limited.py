"""Checkers in a process of their own, with limits: whatever they do, the search goes on.

    answers("pattern", r"\\d+", [("a text", "its prompt")])     # [{"score": 0.0, ...}]

One process checks many texts, one after the other. If one of them takes too long, or takes the
process down, that text has failed, and a new process goes on behind it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from threading import Event
from time import monotonic
from types import TracebackType
from typing import Any, Literal

from unspool.errors import UnspoolError

Kind = Literal["pattern", "function", "tests"]
_LOOK = 0.1  # seconds between two looks at what the process has written
_LOADING = 60.0  # seconds that a checker has to be imported


@dataclass(frozen=True, slots=True)
class Limits:
    """What a checker may take."""

    seconds: float = 10.0  # for one text
    memory: int = 1 << 30  # bytes
    files: int = 64 << 20  # bytes that it may write
    processes: int = 32  # that it may start

    def for_texts(self, count: int) -> dict[str, int]:
        """As `confine` takes them."""
        cpu = ceil(self.seconds * count + _LOADING)
        return {
            "memory": self.memory,
            "cpu": cpu,
            "files": self.files,
            "processes": self.processes,
        }


def answers(
    kind: Kind,
    of: str,
    texts: Sequence[tuple[str, str]],
    limits: Limits | None = None,
    given_up: Event | None = None,
) -> list[dict[str, Any]]:
    """What a checker says of texts, each with its prompt; {"score": None, "why"} where it failed.

    A checker that cannot even be loaded is an `UnspoolError`. `given_up`, once set, ends it early.
    """
    limits, found = limits or Limits(), list[dict[str, Any]]()
    while len(found) < len(texts):
        if given_up is not None and given_up.is_set():
            return found + [_failed("nobody waits for it any more")] * (len(texts) - len(found))
        with _Child(kind, of, texts[len(found) :], limits, given_up or Event()) as child:
            found += child.answers()
    return found


def check_loads(kind: Kind, of: str, limits: Limits | None = None) -> None:
    """An `UnspoolError` if the checker cannot be loaded: told before anything is written."""
    with _Child(kind, of, (), limits or Limits(), Event()) as child:
        for _ in child.answers():
            pass


class _Child:
    """One process, its folder, and the pipe that its answers come through."""

    def __init__(
        self,
        kind: Kind,
        of: str,
        texts: Sequence[tuple[str, str]],
        limits: Limits,
        given_up: Event,
    ) -> None:
        self.of, self.count, self.limits, self.given_up = of, len(texts), limits, given_up
        job = {"kind": kind, "of": of, "texts": texts, "limits": limits.for_texts(len(texts))}
        self.read = b""
        with contextlib.ExitStack() as acquired:  # released here if one step fails, else at the end
            self.folder = Path(tempfile.mkdtemp(prefix="unspool-check-"))
            acquired.callback(shutil.rmtree, self.folder, ignore_errors=True)
            (self.folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
            self.pipe, end = os.pipe()
            acquired.callback(os.close, self.pipe)
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "unspool.decoding.think.judges.child", str(end)],
                    cwd=self.folder,
                    env=_environment(self.folder),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(end,),
                    start_new_session=True,  # so that what it starts ends with it
                )
            finally:
                os.close(end)
            self._acquired = acquired.pop_all()

    def __enter__(self) -> _Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._acquired.close()

    def answers(self) -> Iterator[dict[str, Any]]:
        """One for each text, up to the first that it fails at."""
        ready = self._line(_LOADING)
        if "ready" not in ready:
            if self.given_up.is_set():
                yield ready
                return
            raise UnspoolError(f"{self.of} cannot be used: {ready.get('error') or ready['why']}")
        for _ in range(self.count):
            answer = self._line(self.limits.seconds)
            yield answer
            if "failed" in answer:
                return

    def _line(self, seconds: float) -> dict[str, Any]:
        """The next answer, or why there is none."""
        until = monotonic() + seconds
        while b"\n" not in self.read:
            over = self.process.poll()
            if select.select([self.pipe], [], [], 0 if over is not None else _LOOK)[0]:
                more = os.read(self.pipe, 1 << 16)
                self.read += more
                if more:
                    continue
            if over is not None:
                return _failed(_end_of(over))
            if monotonic() > until or self.given_up.is_set():
                return _failed(f"no answer within {seconds:g} s")
            if _size(self.folder) > self.limits.files:
                return _failed(f"more than {self.limits.files >> 20} MiB written to files")
        line, _, self.read = self.read.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        return answer if isinstance(answer, dict) else _failed("an answer that cannot be read")


def _failed(why: str) -> dict[str, Any]:
    return {"score": None, "why": why, "failed": True}


def _end_of(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "too much processor time"
    return f"it was ended by {signal.Signals(-code).name}" if code < 0 else "it left, no answer"


def _size(folder: Path) -> int:
    found = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it may be gone already
            found += file.lstat().st_size
    return found


def _environment(folder: Path) -> dict[str, str]:
    """Little of ours: no keys, no tokens; the same order of sets every time."""
    kept = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
    return {
        **{name: value for name, value in os.environ.items() if name in kept},
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }
