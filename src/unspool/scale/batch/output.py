"""Write the output files of a batch: the answers, and the failed rows with their errors.

Each is written to a temporary file and renamed, so that it is complete or missing. Rows are in the
order of the input.
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
