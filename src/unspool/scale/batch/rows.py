"""Read the rows of a batch's input, jsonl or parquet, in order.

    {"id": "a", "prompt": "Once upon a time", "max_tokens": 20}
    {"id": "b", "messages": [{"role": "user", "content": "Hi"}]}
    {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

A row is identified by its number (the line of a jsonl file, the row of a parquet file, from 1), and
by its id if it has one. Invalid input becomes a row with a fault.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from unspool.errors import DataError

KINDS = (".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One row of the input."""

    number: int
    id: Any  # from the row, or its number
    data: Any
    is_openai: bool = False
    fault: str | None = None  # why it is invalid

    @property
    def key(self) -> str:
        """A unique key, which determines the row's seed."""
        return json.dumps(self.id, sort_keys=True)


@dataclass(frozen=True, slots=True)
class InputSummary:
    """Content digest and number of rows of an input."""

    digest: str
    rows: int


def parquet_library() -> Any:
    """Return pyarrow.parquet; raise DataError if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            "parquet needs pyarrow: pip install pyarrow, or name a .jsonl file"
        ) from None
    return pyarrow.parquet


def check_file_type(path: Path, what: str) -> None:
    """Raise DataError if a file name is neither jsonl nor parquet."""
    if path.suffix not in KINDS:
        raise DataError(f"{what} must end in {' or '.join(KINDS)}, got {path}")
    if path.suffix == ".parquet":
        parquet_library()


def scan_input(path: Path) -> InputSummary:
    """Read a file once and return its digest and number of rows."""
    if not path.is_file():
        raise DataError(f"no such file: {path} in {Path.cwd()}")
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
    return InputSummary(digest.hexdigest(), count)


def read_rows(path: Path) -> Iterator[BatchRow]:
    """Yield all rows, in order; a duplicate id is a fault."""
    keys: set[str] = set()
    is_openai = False
    for row in _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path):
        if row.fault is None and row.key in keys:
            fault = f"the id {str(row.id)[:80]!r} is not unique"
            row = replace(row, id=row.number, fault=fault)
        if row.fault is None:
            keys.add(row.key)
            is_openai = row.is_openai
        elif is_openai:  # an unreadable row has the format of the row before it
            row = replace(row, is_openai=True)
        yield row


def _json_rows(path: Path) -> Iterator[BatchRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                data = json.loads(line)
            except (ValueError, RecursionError) as error:
                text = line.decode("utf-8", "replace").rstrip("\n")
                yield BatchRow(
                    number, number, text, fault=f"the line is not JSON: {str(error)[:200]}"
                )
                continue
            yield _row(number, data)


def _parquet_rows(path: Path) -> Iterator[BatchRow]:
    number = 0
    try:
        for batch in _opened(path).iter_batches(batch_size=256):
            for data in batch.to_pylist():
                number += 1
                yield _row(number, _without_nulls(data))
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
    """Remove nulls: parquet has one for each column that a row does not have."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _row(number: int, data: Any) -> BatchRow:
    if not isinstance(data, dict):
        reason = 'the row is not a JSON object; write {"prompt": "..."}'
        return BatchRow(number, number, data, fault=reason)
    is_openai = "custom_id" in data or "body" in data
    row_id = data.get("custom_id" if is_openai else "id")
    if row_id is None:
        fault = "custom_id is missing" if is_openai else None
        return BatchRow(number, number, data, is_openai, fault)
    if isinstance(row_id, bool | float | dict | list):
        return BatchRow(number, number, data, is_openai, "the id must be a string or an integer")
    return BatchRow(number, row_id, data, is_openai)


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Generation settings of rows that do not override them."""

    seed: int
    options: dict[str, Any] = field(default_factory=dict)  # of `LanguageModel.stream`
    chat: bool | None = None  # prompts are chat messages; None: if the model has a chat template
    system: str | None = None
    think: bool | str | None = None
    carry: tuple[str, ...] = ()  # columns to copy from the input to the answers
    any_model: bool = False  # also answer rows that name another model

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for JSON, to compare with those of a later command."""
        return {**asdict(self), "carry": list(self.carry)}


def row_seed(seed: int, key: str) -> int:
    """Return a row's seed: a function of the command's seed and the row's id alone.

    So it depends neither on the worker nor on the order.
    """
    return int.from_bytes(hashlib.blake2b(f"{seed} {key}".encode(), digest_size=4).digest(), "big")
