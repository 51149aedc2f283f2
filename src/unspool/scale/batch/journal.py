"""What a batch has done so far, kept so that nothing is lost and nothing is done twice.

Beside OUTPUT lies the folder OUTPUT.unfinished while the work goes on:

    job.json       what was asked for: the input's digest, the settings, the model
    answers.jsonl  a line for each row that is done, in the order in which they were

When all is done, OUTPUT.job.json says what was asked for, so that the same command does nothing.

A line is there whole or not at all: one that was cut off (a kill, a full disk, a lost machine) is
dropped with all after it when the work goes on, and its row is written once more. So every row
that has a line is done, every other is not, and it does not matter when the last run ended.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from unspool.errors import UnspoolError
from unspool.scale.batch.worker import Outcome

_SYNC = 5.0  # seconds after which answers are on the disk, should the machine lose its power
_VERSION = 1
_JOB, _ANSWERS = "job.json", "answers.jsonl"


def unfinished_folder(output: Path) -> Path:
    """Where the work on an output is kept while it goes on."""
    return output.with_name(f"{output.name}.unfinished")


def is_unfinished(output: Path) -> bool:
    """Whether there is something to go on with."""
    return (unfinished_folder(output) / _JOB).exists()


def finished_job(output: Path) -> dict[str, Any] | None:
    """The record of the batch that wrote an output; None if it is not what a batch left there."""
    try:
        record: dict[str, Any] = json.loads(_record_file(output).read_text(encoding="utf-8"))
        return record if record["output_bytes"] == output.stat().st_size else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _record_file(output: Path) -> Path:
    return output.with_name(f"{output.name}.job.json")


def _write_whole(file: Path, content: dict[str, Any]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1), encoding="utf-8")
    part.replace(file)


class JobChangedError(UnspoolError):
    """What is asked for is not what was begun."""


class Journal:
    """The journal of one batch; hold it as a context, as nobody else may meanwhile."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = unfinished_folder(output)
        self.done = self.bad = 0
        self.job: dict[str, Any] = {}
        self._file: BinaryIO | None = None
        self._places = array("q")  # by row number: where its line begins; -1: it has none
        self._synced = time.monotonic()
        self._lock = FileLock(self.folder / "lock")

    def __enter__(self) -> Journal:
        try:
            self.folder.mkdir(exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UnspoolError(
                f"another unspool batch is writing {self.output} now; wait for it, or give "
                "another name"
            ) from None
        except OSError as error:
            raise UnspoolError(f"{self.output} cannot be written: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        self._lock.release()
        if not (self.folder / _JOB).exists():  # nothing was begun, or all is done
            shutil.rmtree(self.folder, ignore_errors=True)

    # -- beginning, and going on ---------------------------------------------------------------

    def open(self, job: dict[str, Any], *, restart: bool = False) -> None:
        """Begin, or go on with what the same command began; JobChangedError if it is another."""
        file, answers = self.folder / _JOB, self.folder / _ANSWERS
        if restart:
            file.unlink(missing_ok=True)
            answers.unlink(missing_ok=True)
        wanted = {"version": _VERSION, **job}
        begun = _read_job(file)
        if begun is None:
            answers.unlink(missing_ok=True)
            self._keep(wanted)
        else:
            self.job = begun
            if changed := changes(begun, wanted):
                raise JobChangedError(
                    f"{self.folder} was begun with {changed}; give the command as it was then, "
                    "or begin anew with --restart"
                )
        self._file = answers.open("ab+")
        self._read_back()

    def begun_seed(self) -> int | None:
        """The seed of what lies there unfinished, for a command that names none."""
        begun = _read_job(self.folder / _JOB)
        return None if begun is None else begun["settings"]["seed"]

    def check_model(self, fingerprint: str) -> None:
        """Every model that answers must be the one that the first answers came from."""
        known = self.job.get("model")
        if known is None:
            self._keep({**self.job, "model": fingerprint})
        elif known != fingerprint:
            raise JobChangedError(
                f"{self.folder} was begun with other weights than this model has; give that one, "
                "or begin anew with --restart"
            )

    def _keep(self, job: dict[str, Any]) -> None:
        self.job = job
        _write_whole(self.folder / _JOB, job)

    def _read_back(self) -> None:
        """Find the rows that are done; cut off what is not whole."""
        assert self._file is not None
        self._file.seek(0)
        place = 0
        for line in self._file:
            outcome = _whole(line)
            if outcome is None:
                break
            self._note(outcome, place)
            place += len(line)
        self._file.truncate(place)
        self._file.seek(place)

    # -- writing -------------------------------------------------------------------------------

    def is_done(self, row: int) -> bool:
        return row < len(self._places) and self._places[row] >= 0

    def record(self, outcomes: Iterable[Outcome]) -> None:
        """Keep what became of rows; a row that is done already stays as it was."""
        assert self._file is not None
        lines, place = [], self._file.tell()
        for outcome in outcomes:
            if self.is_done(outcome["row"]):
                continue
            line = json.dumps(outcome, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
            self._note(outcome, place)
            lines.append(line)
            place += len(line)
        if lines:
            self._file.write(b"".join(lines))
            self._file.flush()  # from here on a kill of this process loses nothing
        if time.monotonic() > self._synced + _SYNC:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def _note(self, outcome: Outcome, place: int) -> None:
        row = outcome["row"]
        if row >= len(self._places):
            self._places.extend([-1] * (row + 1 - len(self._places)))
        self._places[row] = place
        self.done += 1
        self.bad += "error" in outcome

    # -- reading -------------------------------------------------------------------------------

    def outcomes(self) -> Iterator[Outcome]:
        """All that is done, in the order of the rows."""
        with (self.folder / _ANSWERS).open("rb") as file:
            for place in self._places:
                if place >= 0:
                    file.seek(place)
                    yield json.loads(file.readline())

    def finish(self) -> None:
        """Record that the output is complete, and drop what a resumed run would need."""
        record = {**self.job, "failed": self.bad, "output_bytes": self.output.stat().st_size}
        _write_whole(_record_file(self.output), record)
        (self.folder / _JOB).unlink()


def _whole(line: bytes) -> Outcome | None:
    if not line.endswith(b"\n"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    is_one = isinstance(found, dict) and isinstance(found.get("row"), int)
    return found if is_one and ("answer" in found or "error" in found) else None


def _read_job(file: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UnspoolError(f"{file} cannot be read ({error}); begin anew with --restart") from None
    return found


def changes(begun: dict[str, Any], wanted: dict[str, Any]) -> str:
    """In words, what was different then; nothing: it is the same."""
    if begun.get("version") != _VERSION:
        return "another version of Unspool"
    if begun.get("input") != wanted["input"]:
        return "an input of another content"
    before, now = _flat(begun["settings"]), _flat(wanted["settings"])
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    told = [f"{name} {before.get(name)!r} (now {now.get(name)!r})" for name in names]
    return " and ".join(told)


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by their names alone, as they are when they come back from JSON."""
    found: dict[str, Any] = {}
    for name, value in json.loads(json.dumps(settings)).items():
        found |= _flat(value) if name in ("options", "load") else {name: value}
    return found
