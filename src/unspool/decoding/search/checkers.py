"""Rule-based verifiers: a regular expression, a function in a Python file, a file of unit tests.

All run in a separate process with limits (`limited.py`): a regular expression may backtrack without
end, and a unit test runs code that a model wrote.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from threading import Event
from time import monotonic
from types import TracebackType
from typing import Any, Literal

from unspool.decoding.search.verifiers import Verdict, Verifier, VoteVerifier
from unspool.engine.generation import Generation
from unspool.errors import SettingsError, UnspoolError
from unspool.session import Session

# -- Run checkers in a separate process with resource limits


CheckerKind = Literal["pattern", "function", "tests"]
_POLL_S = 0.1
_LOAD_TIMEOUT_S = 60.0  # for importing a checker


@dataclass(frozen=True, slots=True)
class CheckerLimits:
    """Resource limits of a checker."""

    seconds: float = 10.0  # per text
    memory: int = 1 << 30  # bytes
    files: int = 64 << 20  # bytes written to files
    processes: int = 32  # started by it

    def for_texts(self, count: int) -> dict[str, int]:
        """Arguments of `confine` for this many texts."""
        cpu = ceil(self.seconds * count + _LOAD_TIMEOUT_S)
        return {
            "memory": self.memory,
            "cpu": cpu,
            "files": self.files,
            "processes": self.processes,
        }


def answers(
    kind: CheckerKind,
    source: str,
    texts: Sequence[tuple[str, str]],
    limits: CheckerLimits | None = None,
    cancelled: Event | None = None,
) -> list[dict[str, Any]]:
    """Check texts, each with its prompt; {"score": None, "why"} where checking failed.

    Raises `UnspoolError` if the checker cannot be loaded. Setting `cancelled` stops it early.
    """
    limits, results = limits or CheckerLimits(), list[dict[str, Any]]()
    while len(results) < len(texts):
        if cancelled is not None and cancelled.is_set():
            return results + [_failed("the check was cancelled")] * (len(texts) - len(results))
        with _CheckerProcess(
            kind, source, texts[len(results) :], limits, cancelled or Event()
        ) as child:
            results += child.answers()
    return results


def check_loads(kind: CheckerKind, source: str, limits: CheckerLimits | None = None) -> None:
    """Raise `UnspoolError` if the checker cannot be loaded, before anything is generated."""
    with _CheckerProcess(kind, source, (), limits or CheckerLimits(), Event()) as child:
        for _ in child.answers():
            pass


class _CheckerProcess:
    """One checker process, its folder, and the pipe for its answers."""

    def __init__(
        self,
        kind: CheckerKind,
        source: str,
        texts: Sequence[tuple[str, str]],
        limits: CheckerLimits,
        cancelled: Event,
    ) -> None:
        self.source, self.count, self.limits, self.cancelled = source, len(texts), limits, cancelled
        job = {"kind": kind, "of": source, "texts": texts, "limits": limits.for_texts(len(texts))}
        self.unread = b""
        with contextlib.ExitStack() as resources:  # released here if a step fails, else in __exit__
            self.folder = Path(tempfile.mkdtemp(prefix="unspool-check-"))
            resources.callback(shutil.rmtree, self.folder, ignore_errors=True)
            (self.folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
            self.pipe, write_end = os.pipe()
            resources.callback(os.close, self.pipe)
            try:
                self.process = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        "unspool.decoding.search.checker_process",
                        str(write_end),
                    ],
                    cwd=self.folder,
                    env=_environment(self.folder),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(write_end,),
                    start_new_session=True,  # so that its child processes are killed with it
                )
            finally:
                os.close(write_end)
            self._resources = resources.pop_all()

    def __enter__(self) -> _CheckerProcess:
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
        self._resources.close()

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield one answer per text, up to the first failure."""
        ready = self._next_line(_LOAD_TIMEOUT_S)
        if "ready" not in ready:
            if self.cancelled.is_set():
                yield ready
                return
            raise UnspoolError(
                f"{self.source} cannot be used: {ready.get('error') or ready['why']}"
            )
        for _ in range(self.count):
            answer = self._next_line(self.limits.seconds)
            yield answer
            if "failed" in answer:
                return

    def _next_line(self, seconds: float) -> dict[str, Any]:
        """Read the next answer, or a failure with its reason."""
        deadline = monotonic() + seconds
        while b"\n" not in self.unread:
            exit_code = self.process.poll()
            if select.select([self.pipe], [], [], 0 if exit_code is not None else _POLL_S)[0]:
                chunk = os.read(self.pipe, 1 << 16)
                self.unread += chunk
                if chunk:
                    continue
            if exit_code is not None:
                return _failed(_exit_reason(exit_code))
            if monotonic() > deadline or self.cancelled.is_set():
                return _failed(f"no answer within {seconds:g} s")
            if _folder_bytes(self.folder) > self.limits.files:
                return _failed(f"more than {self.limits.files >> 20} MiB written to files")
        line, _, self.unread = self.unread.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        return (
            answer if isinstance(answer, dict) else _failed("the checker wrote an invalid answer")
        )


def _failed(why: str) -> dict[str, Any]:
    return {"score": None, "why": why, "failed": True}


def _exit_reason(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "too much processor time"
    return (
        f"it was ended by {signal.Signals(-code).name}"
        if code < 0
        else "it exited without an answer"
    )


def _folder_bytes(folder: Path) -> int:
    num_bytes = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # the file may be deleted meanwhile
            num_bytes += file.lstat().st_size
    return num_bytes


def _environment(folder: Path) -> dict[str, str]:
    """A minimal environment without secrets, and with a fixed hash seed."""
    passed_on = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
    return {
        **{name: value for name, value in os.environ.items() if name in passed_on},
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }


_MAX_PATTERN_CHARS = 1000  # characters
_PATTERN_SECONDS = 2.0  # for one text
_MAX_PROCESSES = 4  # processes


class _CheckerVerifier:
    """A rule that scores each text independently."""

    partial = False
    kind: CheckerKind

    def __init__(self, lm: Session, source: str, limits: CheckerLimits) -> None:
        self._lm, self._source, self._limits = lm, source, limits
        self._cancelled = Event()

    def cost(self, texts: Sequence[Generation]) -> int:
        """Zero: no model is involved."""
        return 0

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        self._cancelled.clear()
        return [to_verdict(answer) for answer in self._answers(texts)]

    def cancel(self) -> None:
        """Kill the checking process; the remaining texts are not checked."""
        self._cancelled.set()

    def _answers(self, texts: Sequence[Generation]) -> list[dict[str, Any]]:
        return answers(self.kind, self._source, self._inputs(texts), self._limits, self._cancelled)

    def _inputs(self, texts: Sequence[Generation]) -> list[tuple[str, str]]:
        decode = self._lm.tokenizer.decode
        return [(text.text, decode(text.prompt, specials=False)) for text in texts]


class PatternVerifier(_CheckerVerifier):
    """1 if a regular expression matches somewhere in the text, else 0."""

    kind = "pattern"

    def __init__(self, lm: Session, pattern: str, limits: CheckerLimits | None = None) -> None:
        check_pattern(pattern)
        super().__init__(lm, pattern, limits or CheckerLimits(seconds=_PATTERN_SECONDS))

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        return [Verdict(verdict.score, verdict.why) for verdict in super().score(texts)]

    def score_with_match(self, texts: Sequence[Generation]) -> list[Verdict]:
        """Like `score`, with the last match (its first group, if any) as the answer."""
        return super().score(texts)


class PatternVoteVerifier(VoteVerifier):
    """A vote on the last match of a pattern in each text (its first group, if any)."""

    def __init__(
        self,
        lm: Session,
        pattern: str,
        weigher: Verifier | None = None,
        limits: CheckerLimits | None = None,
    ) -> None:
        super().__init__(weigher=weigher)
        self._pattern = PatternVerifier(lm, pattern, limits)

    def answers(self, texts: Sequence[Generation]) -> list[Verdict]:
        return self._pattern.score_with_match(texts)

    def cancel(self) -> None:
        super().cancel()
        self._pattern.cancel()


class FileVerifier(_CheckerVerifier):
    """Score by a function in a Python file, which returns a number or a bool.

    The function is called with the text; with the text and its prompt if it takes two arguments.
    """

    kind = "function"

    def __init__(
        self,
        lm: Session,
        file: str | Path,
        function: str = "check",
        limits: CheckerLimits | None = None,
    ) -> None:
        super().__init__(lm, f"{_python_file(file)}:{function}", limits or CheckerLimits())
        check_loads(self.kind, self._source, self._limits)


class UnitTestVerifier(_CheckerVerifier):
    """The share of a file's unit tests that the code in a text passes.

    Code that fails to run or times out passes none: that is a score of 0, not a failure of the
    verifier.
    """

    kind = "tests"

    def __init__(self, lm: Session, file: str | Path, limits: CheckerLimits | None = None) -> None:
        super().__init__(lm, str(_python_file(file)), limits or CheckerLimits())
        check_loads(self.kind, self._source, self._limits)

    def _answers(self, texts: Sequence[Generation]) -> list[dict[str, Any]]:
        """Check each text in a separate process, so that code of one text cannot affect another."""
        pool = ThreadPoolExecutor(min(_MAX_PROCESSES, os.cpu_count() or 1))
        try:
            futures = [
                pool.submit(answers, self.kind, self._source, [pair], self._limits, self._cancelled)
                for pair in self._inputs(texts)
            ]
            results = [future.result()[0] for future in futures]
        finally:  # on an early exit too (Ctrl-C), leave no process running
            self._cancelled.set()
            pool.shutdown(wait=False, cancel_futures=True)
        return [{**pair, "score": pair["score"] or 0.0} for pair in results]


def to_verdict(answer: dict[str, Any]) -> Verdict:
    """Convert a checker's answer, which may be malformed."""
    return Verdict(answer.get("score"), str(answer.get("why", "")), answer.get("answer"))


def check_pattern(pattern: str) -> None:
    """Raise `SettingsError` for an invalid regular expression, before anything is generated."""
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise SettingsError(
            f"the verifier's pattern is longer than {_MAX_PATTERN_CHARS} characters"
        )
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise SettingsError(
            f"the verifier's pattern {pattern!r:.60} is not a regular expression: {error}"
        ) from error


def _python_file(file: str | Path) -> Path:
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise SettingsError(
            f"the verifier's file {file} does not exist; give the path of a .py file"
        )
    return path
