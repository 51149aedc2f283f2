"""The journal of a batch job: resume after any interruption, without loss or duplicates.

While the job is unfinished, the folder OUTPUT.unfinished contains:

    job.json       the request: digest of the input, settings, model
    answers.jsonl  a line for each row that is done, in the order of completion

After the job, OUTPUT.job.json contains the request, so that the same command does nothing.

A truncated line (kill, full disk, lost machine) is dropped with all lines after it on resume, and
its row is processed again. So every row with a line is done and every other row is not, no matter
when the last run ended.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from unspool.errors import UnspoolError
from unspool.scale.batch.rows import parquet_library
from unspool.scale.batch.worker import Outcome

_SYNC_S = 5.0  # between fsyncs, for power failures
_VERSION = 1
_JOB, _ANSWERS = "job.json", "answers.jsonl"


def unfinished_folder(output: Path) -> Path:
    """Return the folder of an output's unfinished job."""
    return output.with_name(f"{output.name}.unfinished")


def is_unfinished(output: Path) -> bool:
    """Return whether there is an unfinished job to resume."""
    return (unfinished_folder(output) / _JOB).exists()


def finished_job(output: Path) -> dict[str, Any] | None:
    """Return the record of the job that wrote an output, None if no job wrote it."""
    try:
        record: dict[str, Any] = json.loads(_record_file(output).read_text(encoding="utf-8"))
        return record if record["output_bytes"] == output.stat().st_size else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _record_file(output: Path) -> Path:
    return output.with_name(f"{output.name}.job.json")


def _write_atomically(file: Path, content: dict[str, Any]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1), encoding="utf-8")
    part.replace(file)


class JobChangedError(UnspoolError):
    """The request differs from that of the unfinished job."""


class Journal:
    """The journal of one job; a context manager that holds the job's lock."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = unfinished_folder(output)
        self.num_done = self.num_failed = 0
        self.job: dict[str, Any] = {}
        self._file: BinaryIO | None = None
        self._offsets = array("q")  # by row number: file offset of its line, -1 if it has none
        self._synced = time.monotonic()
        self._lock = FileLock(self.folder / "lock")

    def __enter__(self) -> Journal:
        try:
            self.folder.mkdir(exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UnspoolError(
                f"another unspool batch is writing {self.output}; wait for it, or give another name"
            ) from None
        except OSError as error:
            raise UnspoolError(f"{self.output} cannot be written: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        self._lock.release()
        if not (self.folder / _JOB).exists():  # not started, or complete
            shutil.rmtree(self.folder, ignore_errors=True)

    def open(self, job: dict[str, Any], *, restart: bool = False) -> None:
        """Start a job, or resume the unfinished one; raise JobChangedError if it differs."""
        file, answers = self.folder / _JOB, self.folder / _ANSWERS
        if restart:
            file.unlink(missing_ok=True)
            answers.unlink(missing_ok=True)
        request = {"version": _VERSION, **job}
        unfinished = _read_job(file)
        if unfinished is None:
            answers.unlink(missing_ok=True)
            self._save_job(request)
        else:
            self.job = unfinished
            if changed := describe_changes(unfinished, request):
                raise JobChangedError(
                    f"{self.folder} was started with {changed}; give the same command again, or "
                    "start over with --restart"
                )
        self._file = answers.open("ab+")
        self._read_back()

    def unfinished_seed(self) -> int | None:
        """Return the seed of the unfinished job, for a command without a seed."""
        unfinished = _read_job(self.folder / _JOB)
        return None if unfinished is None else unfinished["settings"]["seed"]

    def check_model(self, fingerprint: str) -> None:
        """Raise JobChangedError if the weights differ from those of the first answers."""
        recorded = self.job.get("model")
        if recorded is None:
            self._save_job({**self.job, "model": fingerprint})
        elif recorded != fingerprint:
            raise JobChangedError(
                f"{self.folder} was started with other weights than this model's; give that model, "
                "or start over with --restart"
            )

    def _save_job(self, job: dict[str, Any]) -> None:
        self.job = job
        _write_atomically(self.folder / _JOB, job)

    def _read_back(self) -> None:
        """Read the rows that are done; truncate the file after the last complete line."""
        assert self._file is not None
        self._file.seek(0)
        offset = 0
        for line in self._file:
            outcome = _parse_line(line)
            if outcome is None:
                break
            self._note(outcome, offset)
            offset += len(line)
        self._file.truncate(offset)
        self._file.seek(offset)

    def is_done(self, row: int) -> bool:
        return row < len(self._offsets) and self._offsets[row] >= 0

    def record(self, outcomes: Iterable[Outcome]) -> None:
        """Append outcomes; rows that are already done are ignored."""
        assert self._file is not None
        lines, offset = [], self._file.tell()
        for outcome in outcomes:
            if self.is_done(outcome["row"]):
                continue
            line = json.dumps(outcome, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
            self._note(outcome, offset)
            lines.append(line)
            offset += len(line)
        if lines:
            self._file.write(b"".join(lines))
            self._file.flush()  # from here on a kill loses nothing
        if time.monotonic() > self._synced + _SYNC_S:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def _note(self, outcome: Outcome, offset: int) -> None:
        row = outcome["row"]
        if row >= len(self._offsets):
            self._offsets.extend([-1] * (row + 1 - len(self._offsets)))
        self._offsets[row] = offset
        self.num_done += 1
        self.num_failed += "error" in outcome

    def outcomes(self) -> Iterator[Outcome]:
        """Yield all outcomes, in the order of the rows."""
        with (self.folder / _ANSWERS).open("rb") as file:
            for offset in self._offsets:
                if offset >= 0:
                    file.seek(offset)
                    yield json.loads(file.readline())

    def finish(self) -> None:
        """Record that the output is complete, and delete the job file."""
        record = {**self.job, "failed": self.num_failed, "output_bytes": self.output.stat().st_size}
        _write_atomically(_record_file(self.output), record)
        (self.folder / _JOB).unlink()


def _parse_line(line: bytes) -> Outcome | None:
    """Return the outcome in a complete line, None if it is truncated or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        outcome = json.loads(line)
    except ValueError:
        return None
    has_row = isinstance(outcome, dict) and isinstance(outcome.get("row"), int)
    return outcome if has_row and ("answer" in outcome or "error" in outcome) else None


def _read_job(file: Path) -> dict[str, Any] | None:
    try:
        job: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UnspoolError(f"{file} cannot be read ({error}); start over with --restart") from None
    return job


def describe_changes(before: dict[str, Any], request: dict[str, Any]) -> str:
    """Describe how an earlier job differs from a request; empty if it does not."""
    if before.get("version") != _VERSION:
        return "another version of Unspool"
    if before.get("input") != request["input"]:
        return "different input content"
    then, now = _flat(before["settings"]), _flat(request["settings"])
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return " and ".join(f"{name} {then.get(name)!r} (now {now.get(name)!r})" for name in names)


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return nested settings as one level, with the types of JSON."""
    flat: dict[str, Any] = {}
    for name, value in json.loads(json.dumps(settings)).items():
        flat |= _flat(value) if name in ("options", "load") else {name: value}
    return flat


_ROW_GROUP = 8192  # rows per parquet row group


def errors_file(output: Path) -> Path:
    """Return the file of the failed rows."""
    return output.with_name(f"{output.stem}.errors.jsonl")


def write_output(journal: Journal) -> None:
    """Write the answers, and the failed rows if there are any."""
    output, errors = journal.output, errors_file(journal.output)
    part = journal.folder / "output.part"
    if journal.num_failed:
        outcomes = journal.outcomes()
        _write_json(part, (outcome["error"] for outcome in outcomes if "error" in outcome))
        part.replace(errors)
    else:
        errors.unlink(missing_ok=True)  # of an earlier run
    if output.suffix == ".parquet":
        _write_parquet(part, journal)
    else:
        _write_json(part, _answers(journal))
    part.replace(output)
    journal.finish()


def _answers(journal: Journal) -> Iterator[dict[str, Any]]:
    return (outcome["answer"] for outcome in journal.outcomes() if "answer" in outcome)


def _write_json(path: Path, lines: Iterable[Any]) -> None:
    with path.open("w", encoding="utf-8", errors="replace") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _write_parquet(path: Path, journal: Journal) -> None:
    """Write scalar columns as they are; nested values and columns of mixed types become JSON.

    The answers are read twice, as the types are known only after the last row.
    """
    parquet = parquet_library()
    import pyarrow

    kinds: dict[str, set[type]] = {}
    for answer in _answers(journal):
        for name, value in answer.items():
            kinds.setdefault(name, set()).add(_kind(value))
    schema = pyarrow.schema([(name, _type(pyarrow, types)) for name, types in kinds.items()])
    answers = _answers(journal)
    with parquet.ParquetWriter(path, schema) as writer:
        while group := list(islice(answers, _ROW_GROUP)):
            columns = [
                pyarrow.array([_cell(row.get(field.name), field.type) for row in group], field.type)
                for field in schema
            ]
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))


def _kind(value: Any) -> type:
    """Return the type of a value; integers over 64 bits are written as strings."""
    return str if type(value) is int and value.bit_length() > 63 else type(value)


def _type(pyarrow: Any, kinds: set[type]) -> Any:
    types = kinds - {type(None)}
    if types == {bool}:
        return pyarrow.bool_()
    if types == {int}:
        return pyarrow.int64()
    return pyarrow.float64() if types in ({float}, {int, float}) else pyarrow.string()


def _cell(value: Any, kind: Any) -> Any:
    if value is None or isinstance(value, str) or str(kind) != "string":
        return value
    return json.dumps(value, ensure_ascii=False)
