"""Stream the documents of a file; only a few are in memory at a time.

A text file is one document; a file longer than `part_size` is split at blank lines, so that a file
of any length can be read and a part of it held out. Tables have one document per row.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from unspool.errors import DataError
from unspool.train.data.shapes import Document, parse_row

PART = 256 * 1024  # characters of a text read together

TEXTS = (".txt", ".text", ".md", ".markdown", ".rst")
TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")

_ROW_SEPARATOR = re.compile(r"[\[,\s]*")  # in a JSON list


@dataclass(frozen=True)
class SourceFile:
    """A file to read, or a member of a zip archive (a Python wheel is one)."""

    path: Path
    member: str | None = None
    held_out: bool = False  # the data set's own evaluation split, such as valid.jsonl
    part_size: int = PART

    def __str__(self) -> str:
        return f"{self.path}, {self.member}" if self.member else str(self.path)

    @property
    def kind(self) -> str:
        """File suffix without `.gz`; ".txt" for everything unknown."""
        name = (self.member or self.path.name).lower().removesuffix(".gz")
        return next((end for end in TABLES if name.endswith(end)), ".txt")

    @property
    def size(self) -> int:
        """Size on disk in bytes; 0 for a member of an archive."""
        return self.path.stat().st_size if self.member is None else 0

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open the decompressed bytes. Read errors become `DataError`."""
        try:
            if self.member is not None:
                with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as inside:
                    yield inside
            elif self.path.name.lower().endswith(".gz"):
                with gzip.open(self.path) as unpacked:
                    yield cast(IO[bytes], unpacked)
            else:
                with self.path.open("rb") as file:
                    yield file
        except (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, KeyError) as error:
            raise DataError(f"{self} is damaged or truncated ({error}): get it again") from None
        except OSError as error:
            raise DataError(f"{self} cannot be read: {error.strerror or error}") from None


def read_documents(file: SourceFile, field: str | None = None) -> Iterator[Document]:
    """Yield the documents of one file, in order."""
    if file.kind == ".txt":
        yield from _text_parts(file)
        return
    for where, row in read_rows(file):
        yield parse_row(row, where, field)


def read_rows(file: SourceFile) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a table, each with its location for error messages."""
    readers = {".parquet": _parquet_rows, ".csv": _csv_rows, ".tsv": _csv_rows, ".json": _json_list}
    for where, row in readers.get(file.kind, _json_lines)(file):
        yield f"{file}, {where}", row


# Text.


def _text_parts(file: SourceFile) -> Iterator[Document]:
    size, pending, begins = file.part_size, "", True
    for chunk in _decode_chunks(file):
        pending += chunk
        while len(pending) > 2 * size:  # so that the last part is no shorter than `size`
            end = _split_index(pending, size)
            yield Document(text=pending[:end], is_start=begins, is_end=False)
            pending, begins = pending[end:], False
    yield Document(text=pending, is_start=begins)


def _split_index(text: str, size: int) -> int:
    """Where to split: after a blank line, else after a line, else before a space, else anywhere."""
    for separator, width in (("\n\n", 2), ("\n", 1), (" ", 0)):
        index = text.rfind(separator, size // 2, size)
        if index > 0:
            return index + width
    return size


def _decode_chunks(file: SourceFile) -> Iterator[str]:
    """Yield the text in chunks. Line ends are kept, because bytes are counted later."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    done = 0
    with file.open() as raw:
        while True:
            chunk = raw.read(PART)
            _refuse_binary(chunk, file)
            pending = len(decoder.getstate()[0])  # bytes of an incomplete character
            try:
                yield decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file} is not UTF-8 (at byte {done - pending + error.start:,}): convert it,"
                    " such as with iconv -f latin1 -t utf-8"
                ) from None
            if not chunk:
                return
            done += len(chunk)


def _refuse_binary(chunk: bytes, file: SourceFile) -> None:
    if chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(
            f"{file} is UTF-16, not UTF-8: convert it, such as with iconv -f utf-16 -t utf-8"
        )
    if b"\0" in chunk:
        raise DataError(
            f"{file} is a binary file: give text ({', '.join(TEXTS[:3])}) or tables"
            f" ({', '.join(TABLES)}), optionally as .gz"
        )


# Tables.


def _json_lines(file: SourceFile) -> Iterator[tuple[str, Any]]:
    with file.open() as raw:
        for number, line in enumerate(raw, start=1):
            _refuse_binary(line, file)
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                yield f"line {number}", json.loads(line)
            except UnicodeDecodeError:
                raise DataError(f"{file}, line {number} is not UTF-8: convert the file") from None
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{file}, line {number} is not valid JSON ({error}): each line must be one"
                    " object"
                ) from None


def _json_list(file: SourceFile) -> Iterator[tuple[str, Any]]:
    """Yield the rows of one JSON list; a .json file without a list is read as JSON lines."""
    decode, pending, number, is_list = json.JSONDecoder().raw_decode, "", 0, False
    for chunk in _decode_chunks(file):
        pending, at = pending + chunk, 0
        is_list = is_list or pending.lstrip().startswith("[")
        if pending.strip() and not is_list:
            yield from _json_lines(file)
            return
        while pending.startswith("{", at := _ROW_SEPARATOR.match(pending, at).end()):  # type: ignore[union-attr]
            try:
                row, at = decode(pending, at)
            except (ValueError, RecursionError):  # incomplete: read another chunk
                break
            number += 1
            yield f"row {number}", row
        pending = pending[at:]
    if pending.strip() not in ("]", ""):
        raise DataError(f"{file}, row {number + 1} is not a JSON object: give a list of objects")


def _csv_rows(file: SourceFile) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(sys.maxsize)
    with file.open() as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        reader = csv.DictReader(text, delimiter="\t" if file.kind == ".tsv" else ",")
        rows = iter(reader)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except UnicodeDecodeError:
                raise DataError(
                    f"{file} is not UTF-8 (after line {reader.line_num}): convert it, such as"
                    " with iconv -f latin1 -t utf-8"
                ) from None
            except csv.Error as error:
                raise DataError(f"{file}, line {reader.line_num}: {error}") from None
            if None in row or None in row.values():
                raise DataError(
                    f"{file}, line {reader.line_num} has a different number of cells than the"
                    " header: check its quotes"
                )
            yield f"line {reader.line_num}", row


def _parquet_rows(file: SourceFile) -> Iterator[tuple[str, Any]]:
    parquet = _parquet_library(file)
    with file.open() as raw:
        try:
            table = parquet.ParquetFile(raw)
            number = 0
            for batch in table.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            if isinstance(error, DataError):
                raise
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{file} cannot be read as parquet: {reason}") from None


def _parquet_library(file: SourceFile) -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{file} needs pyarrow: pip install 'unspool[train]', or give the data as jsonl"
        ) from None
    return parquet
