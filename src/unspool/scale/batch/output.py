"""The files that a batch leaves: the answers, and the rows that were set aside with their reason.

Each is written under another name and then renamed, so that a file is there whole or not at all.
Rows stand in the order of the input, whoever has written them when.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from unspool.scale.batch.journal import Journal
from unspool.scale.batch.rows import parquet_library

_GROUP = 8192  # rows of a parquet file that are written together


def errors_file(output: Path) -> Path:
    """Where the rows are that could not be answered."""
    return output.with_name(f"{output.stem}.errors.jsonl")


def write_output(journal: Journal) -> None:
    """Make one file of all answers, and one of all that were set aside, if there are any."""
    output, errors = journal.output, errors_file(journal.output)
    part = journal.folder / "output.part"
    if journal.bad:
        _write_json(part, (one["error"] for one in journal.outcomes() if "error" in one))
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
    return (one["answer"] for one in journal.outcomes() if "answer" in one)


def _write_json(path: Path, lines: Iterable[Any]) -> None:
    with path.open("w", encoding="utf-8", errors="replace") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _write_parquet(path: Path, journal: Journal) -> None:
    """Single values as they are, everything else as JSON; so is a column whose values are not of
    one type. Which these are is known only when all were seen: the answers are read twice."""
    parquet = parquet_library()
    import pyarrow

    kinds: dict[str, set[type]] = {}
    for answer in _answers(journal):
        for name, value in answer.items():
            kinds.setdefault(name, set()).add(_kind(value))
    schema = pyarrow.schema([(name, _type(pyarrow, found)) for name, found in kinds.items()])
    answers = _answers(journal)
    with parquet.ParquetWriter(path, schema) as writer:
        while group := list(islice(answers, _GROUP)):
            columns = [
                pyarrow.array([_cell(row.get(field.name), field.type) for row in group], field.type)
                for field in schema
            ]
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))


def _kind(value: Any) -> type:
    """A whole number that no column of them can hold goes the way of everything else."""
    return str if type(value) is int and value.bit_length() > 63 else type(value)


def _type(pyarrow: Any, kinds: set[type]) -> Any:
    found = kinds - {type(None)}
    if found == {bool}:
        return pyarrow.bool_()
    if found == {int}:
        return pyarrow.int64()
    return pyarrow.float64() if found == {float} or found == {int, float} else pyarrow.string()


def _cell(value: Any, kind: Any) -> Any:
    if value is None or isinstance(value, str) or str(kind) != "string":
        return value
    return json.dumps(value, ensure_ascii=False)
