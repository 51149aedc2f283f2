"""From a file to its documents, one after the other: never more than a few of them in memory.

A text file is one document; one that is longer than `part_size` is cut at blank lines, so that a
file of any length can be read, and some of it held out. All else has a document in each row.
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
from unspool.train.data.shapes import Document, document_of

PART = 256 * 1024  # characters of a text that are read at once

TEXTS = (".txt", ".text", ".md", ".markdown", ".rst")
TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")

_BETWEEN_ROWS = re.compile(r"[\[,\s]*")  # of a list in JSON


@dataclass(frozen=True)
class SourceFile:
    """A file to read: its place, or its place inside a zip archive (a Python wheel is one)."""

    path: Path
    member: str | None = None
    held_out: bool = False  # it was set apart by whoever made the data: valid.jsonl
    part_size: int = PART

    def __str__(self) -> str:
        return f"{self.path}, {self.member}" if self.member else str(self.path)

    @property
    def kind(self) -> str:
        """What the name says it is, `.gz` left aside; everything unknown is read as text."""
        name = (self.member or self.path.name).lower().removesuffix(".gz")
        return next((end for end in TABLES if name.endswith(end)), ".txt")

    @property
    def size(self) -> int:
        """How many bytes long the file is as it lies there."""
        return self.path.stat().st_size if self.member is None else 0

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Its bytes, unpacked; what goes wrong in reading them is told in words."""
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
            raise DataError(f"{self} is damaged or cut off ({error}): fetch it again") from None
        except OSError as error:
            raise DataError(f"{self} cannot be read: {error.strerror or error}") from None


def read_documents(file: SourceFile, field: str | None = None) -> Iterator[Document]:
    """The documents of one file, in order."""
    if file.kind == ".txt":
        yield from _texts(file)
        return
    for where, row in read_rows(file):
        yield document_of(row, where, field)


def read_rows(file: SourceFile) -> Iterator[tuple[str, Any]]:
    """The rows of a table as they are, each with the words that say where it stands."""
    readers = {".parquet": _parquet_rows, ".csv": _csv_rows, ".tsv": _csv_rows, ".json": _json_list}
    for where, row in readers.get(file.kind, _json_lines)(file):
        yield f"{file}, {where}", row


# Text.


def _texts(file: SourceFile) -> Iterator[Document]:
    size, waiting, begins = file.part_size, "", True
    for chunk in _decoded(file):
        waiting += chunk
        while len(waiting) > 2 * size:  # so that what is left at the end is no shorter than a part
            cut = _cut(waiting, size)
            yield Document(text=waiting[:cut], begins=begins, ends=False)
            waiting, begins = waiting[cut:], False
    yield Document(text=waiting, begins=begins)


def _cut(text: str, size: int) -> int:
    """Where to cut: behind a blank line, else a line, else before a space, else anywhere."""
    for mark, behind in (("\n\n", 2), ("\n", 1), (" ", 0)):
        found = text.rfind(mark, size // 2, size)
        if found > 0:
            return found + behind
    return size


def _decoded(file: SourceFile) -> Iterator[str]:
    """The text in stretches. Line ends stay as they are: bytes are counted later."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    done = 0
    with file.open() as raw:
        while True:
            chunk = raw.read(PART)
            _refuse_binary(chunk, file)
            waiting = len(decoder.getstate()[0])  # bytes of a character that was not whole yet
            try:
                yield decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file} is not UTF-8 (at byte {done - waiting + error.start:,}): convert it,"
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
            f"{file} is a binary file and no text: give text ({', '.join(TEXTS[:3])}) or tables"
            f" ({', '.join(TABLES)}), also as .gz"
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
                    f"{file}, line {number} is no JSON ({error}): each line must be one object"
                ) from None


def _json_list(file: SourceFile) -> Iterator[tuple[str, Any]]:
    """One list with all rows; or, under the same name, lines."""
    decode, waiting, number, is_list = json.JSONDecoder().raw_decode, "", 0, False
    for chunk in _decoded(file):
        waiting, at = waiting + chunk, 0
        is_list = is_list or waiting.lstrip().startswith("[")
        if waiting.strip() and not is_list:
            yield from _json_lines(file)
            return
        while waiting.startswith("{", at := _BETWEEN_ROWS.match(waiting, at).end()):  # type: ignore[union-attr]
            try:
                row, at = decode(waiting, at)
            except (ValueError, RecursionError):  # the rest of it is still to come
                break
            number += 1
            yield f"row {number}", row
        waiting = waiting[at:]
    if waiting.strip() not in ("]", ""):
        raise DataError(f"{file}, row {number + 1} is no JSON object: give a list of objects")


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
                    f"{file} is not UTF-8 (behind line {reader.line_num}): convert it, such as"
                    " with iconv -f latin1 -t utf-8"
                ) from None
            except csv.Error as error:
                raise DataError(f"{file}, line {reader.line_num}: {error}") from None
            if None in row or None in row.values():
                raise DataError(
                    f"{file}, line {reader.line_num} has another number of cells than the first"
                    " line: check its quotes"
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
