"""The rows of a batch's input: jsonl or parquet, read from the beginning each time, in order.

    {"id": "a", "prompt": "Once upon a time", "max_tokens": 20}
    {"id": "b", "messages": [{"role": "user", "content": "Hi"}]}
    {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

A row is known by its number (the line of a jsonl file, the row of a parquet file, from 1), and by
its id if it has one. What cannot be read as a row is one with a fault.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unspool.errors import DataError

KINDS = (".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it was given."""

    number: int
    id: Any  # the row's own, or its number
    given: Any
    is_openai: bool = False
    fault: str | None = None  # why it is none

    @property
    def key(self) -> str:
        """What tells it from all others, and decides its seed."""
        return json.dumps(self.id, sort_keys=True)


@dataclass(frozen=True, slots=True)
class InputFacts:
    """What must be known of an input before work begins."""

    digest: str  # of its content
    rows: int


def parquet_library() -> Any:
    """pyarrow's parquet, or a sentence that says what to install."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            "parquet needs pyarrow: pip install pyarrow, or name a .jsonl file"
        ) from None
    return pyarrow.parquet


def check_kind(path: Path, what: str) -> None:
    """Refuse a file that is neither jsonl nor parquet by its name."""
    if path.suffix not in KINDS:
        raise DataError(f"{what} is {path}; its name may end in {' or '.join(KINDS)}")
    if path.suffix == ".parquet":
        parquet_library()


def survey(path: Path) -> InputFacts:
    """Read a file once: its digest, and how many rows it has."""
    if not path.is_file():
        raise DataError(f"there is no file {path} in {Path.cwd()}")
    digest, count = hashlib.sha256(), 0
    with path.open("rb") as file:
        if path.suffix == ".parquet":
            while piece := file.read(1 << 20):
                digest.update(piece)
        else:
            for line in file:
                digest.update(line)
                count += not line.isspace()
    if path.suffix == ".parquet":
        count = _opened(path).metadata.num_rows
    if not count:
        raise DataError(f"{path} has no rows")
    return InputFacts(digest.hexdigest(), count)


def read_rows(path: Path) -> Iterator[Row]:
    """All rows, in order; an id that was there before is a fault."""
    seen: set[str] = set()
    is_openai = False
    for row in _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path):
        if row.fault is None and row.key in seen:
            fault = f"the id {str(row.id)[:80]!r} was another row's already"
            row = replace(row, id=row.number, fault=fault)
        if row.fault is None:
            seen.add(row.key)
            is_openai = row.is_openai
        elif is_openai:  # what cannot be read is taken for one of its neighbours' kind
            row = replace(row, is_openai=True)
        yield row


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                given = json.loads(line)
            except (ValueError, RecursionError) as error:
                text = line.decode("utf-8", "replace").rstrip("\n")
                yield Row(number, number, text, fault=f"the line is not JSON: {str(error)[:200]}")
                continue
            yield _row(number, given)


def _parquet_rows(path: Path) -> Iterator[Row]:
    number = 0
    try:
        for batch in _opened(path).iter_batches(batch_size=256):
            for given in batch.to_pylist():
                number += 1
                yield _row(number, _without_nulls(given))
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise _unreadable(path, error) from None


def _opened(path: Path) -> Any:
    try:
        return parquet_library().ParquetFile(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> DataError:
    if isinstance(error, DataError):
        return error
    return DataError(f"{path} cannot be read as parquet: {' '.join(str(error).split())[:200]}")


def _without_nulls(value: Any) -> Any:
    """A column that a row does not have is null there."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _row(number: int, given: Any) -> Row:
    if not isinstance(given, dict):
        return Row(number, number, given, fault='the row is no object; write {"prompt": "..."}')
    is_openai = "custom_id" in given or "body" in given
    own = given.get("custom_id" if is_openai else "id")
    if own is None:
        fault = "custom_id is missing" if is_openai else None
        return Row(number, number, given, is_openai, fault)
    if isinstance(own, bool | float | dict | list):
        return Row(number, number, given, is_openai, "the id may be a text or a whole number")
    return Row(number, own, given, is_openai)
