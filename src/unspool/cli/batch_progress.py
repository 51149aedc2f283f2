"""A batch at work, as the person sees it: how far, how fast, how long still, and how it ended."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from unspool.cli import interrupt
from unspool.cli.show import err, say
from unspool.errors import UnspoolError, count

if TYPE_CHECKING:
    from unspool.scale.batch.job import BatchProgress, WorkerPool
    from unspool.scale.batch.journal import Journal

    Tell = Callable[[BatchProgress], None]

SET_ASIDE = 1  # the exit code when all is done and some rows could not be answered
_TERMINATED = 143  # what shells say of a program that SIGTERM has ended
_BETWEEN = 10.0  # seconds from one line to the next where no bar can be drawn


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which stops a batch as Ctrl-C does."""


def answer(rows: Path, journal: Journal, hire: Callable[[], WorkerPool], *, quiet: bool) -> int:
    """Answer all rows, and say how that goes; the exit code."""
    from unspool.cli.options import warnings_said
    from unspool.scale.batch.job import run_batch

    begun, total = journal.num_done, journal.job["rows"]
    if begun and not quiet:
        say(f"resuming: {begun:,} of {count(total, 'row')} done already")
    started = time.monotonic()
    try:
        with _stopping(), _shown(begun, quiet) as tell, warnings_said():
            state = run_batch(rows, journal, hire, tell)
    except KeyboardInterrupt as stopped:
        say(
            f"stopped: {journal.num_done:,} of {total:,} rows are done and kept in "
            f"{journal.folder}; rerun the same command to resume"
        )
        return _TERMINATED if isinstance(stopped, _Terminated) else interrupt.INTERRUPTED
    except OSError as error:
        raise UnspoolError(
            f"{error}: {journal.num_done:,} of {total:,} rows are done and kept in "
            f"{journal.folder}; fix it, then rerun the same command to resume"
        ) from None
    if not quiet:
        say(_closing(state, state.num_done - begun, time.monotonic() - started, journal))
    return SET_ASIDE if state.num_failed else 0


@contextmanager
def _stopping() -> Iterator[None]:
    """In here Ctrl-C and SIGTERM are exceptions, so that what was begun is put in order."""

    def told(*_: object) -> NoReturn:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, told)
    try:
        with interrupt.raised():
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _shown(begun: int, quiet: bool) -> Iterator[Tell]:
    """A bar where a person looks, a line now and then where a file does."""
    if quiet:
        yield lambda state: None
    elif sys.stderr.isatty():
        with _bar(begun) as tell:
            yield tell
    else:
        yield _lines(begun)


@contextmanager
def _bar(begun: int) -> Iterator[Tell]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TextColumn("{task.fields[speed]}"))  # fmt: skip
    with Progress(*columns, console=err(), transient=True) as bar:
        task = bar.add_task("loading the model", total=None, speed="")
        clock = _Clock(begun)

        def tell(state: BatchProgress) -> None:
            label = "writing" if state.workers == 1 else f"writing with {state.workers} workers"
            bar.update(task, description=label, total=state.rows, completed=state.num_done,
                       speed=clock.speed(state))  # fmt: skip

        yield tell


def _lines(begun: int) -> Tell:
    clock, told = _Clock(begun), time.monotonic()

    def tell(state: BatchProgress) -> None:
        nonlocal told
        speed = clock.speed(state)
        if speed and time.monotonic() > told + _BETWEEN:
            told = time.monotonic()
            say(f"{state.num_done:,} of {state.rows:,} rows · {speed}")

    return tell


class _Clock:
    """How fast rows are answered, since the model was there."""

    def __init__(self, begun: int) -> None:
        self.begun, self.started = begun, 0.0

    def speed(self, state: BatchProgress) -> str:
        now = time.monotonic()
        self.started = self.started or now
        written, seconds = state.num_done - self.begun, now - self.started
        if not written or seconds <= 0:
            return ""
        left = (state.rows - state.num_done) * seconds / written
        bad = f" · {state.num_failed:,} set aside" if state.num_failed else ""
        return (
            f"{written / seconds:,.1f} rows/s · {state.tokens / seconds:,.0f} tokens/s · "
            f"{_duration(left)} left{bad}"
        )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _closing(state: BatchProgress, written: int, seconds: float, journal: Journal) -> str:
    from unspool.scale.batch.journal import errors_file

    told = f"{count(written, 'row')} in {_duration(seconds)}"
    if state.num_failed:
        answered = state.num_done - state.num_failed
        told = (
            f"{answered:,} of {count(state.rows, 'row')} answered, {state.num_failed:,} failed, in "
            f"{_duration(seconds)}"
        )
    if written and seconds > 0:
        told += f" ({written / seconds:,.1f} rows/s, {state.tokens / seconds:,.0f} tokens/s)"
    told += f": {journal.output}"
    if state.num_failed:
        first = next(one["error"] for one in journal.outcomes() if "error" in one)["error"]
        reason = first["message"] if isinstance(first, dict) else first
        told += f"; those that failed: {errors_file(journal.output)} (the first: {reason})"
    return told
