"""The first look through a source: which documents are duplicates, and which are held out.

A document is known by eight bytes of its hash, so that a source of any size can be looked through:
ten million documents take 80 MB. Both choices depend only on what the documents say and on the
seed, so they are the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from unspool.errors import DataError, SettingsError
from unspool.model.download import file_sha256
from unspool.train.data.readers import SourceFile, read_documents
from unspool.train.data.shapes import Document
from unspool.train.data.shuffle import mixed
from unspool.train.data.sources import Source, source_files

Progress = Callable[[str, int, int], None]  # what is being done, how far, how much there is

TRAIN, HELD_OUT, DROPPED = 0, 1, 2

_FEWEST_HELD_OUT = 4
_VERSION = 1  # of how documents are read; another one is prepared anew


@dataclass(frozen=True)
class Selection:
    """Which documents are meant, and which of them are to be held out."""

    names: tuple[str, ...]  # of the source, as it was given
    files: tuple[SourceFile, ...]
    field: str | None
    limit: int | None
    share: float  # of the documents that are held out, where no file is set apart for that
    seed: int

    def content_hash(self) -> str:
        """A hash of the files' bytes and of the settings."""
        contents = {path: file_sha256(path) for path in {file.path for file in self.files}}
        files = [
            (contents[file.path], file.member, file.kind, file.held_out, file.part_size)
            for file in self.files
        ]
        everything = [_VERSION, files, self.field, self.limit, self.share, self.seed]
        return hashlib.sha256(json.dumps(everything).encode()).hexdigest()

    def read(self, *, with_empty: bool = False) -> Iterator[tuple[SourceFile, Document]]:
        """The documents; `limit` counts those that are not set apart."""
        left = -1 if self.limit is None else self.limit
        for file in self.files:
            for document in read_documents(file, self.field):
                if document.is_empty and not with_empty:
                    continue
                if not file.held_out and not document.is_empty:
                    if left == 0:
                        break
                    left -= 1
                yield file, document


def select(
    source: Source,
    *,
    field: str | None = None,
    limit: int | None = None,
    held_out: float | Source = 0.01,
    seed: int = 0,
    offline: bool = False,
) -> Selection:
    """`held_out` is a share of the documents (at least a few of them), or a source of its own."""
    names = [source] if isinstance(source, str | Path) else source
    files = source_files(source, offline=offline)
    share = float(held_out) if isinstance(held_out, int | float) else 0.0
    if not isinstance(held_out, int | float):
        files = [file for file in files if not file.held_out]
        apart = source_files(held_out, offline=offline)
        files += [replace(file, held_out=True) for file in apart]
    if not 0 <= share < 1:
        raise SettingsError(f"held_out must be at least 0 and below 1, not {share}")
    return Selection(tuple(map(str, names)), tuple(files), field, limit, share, seed)


@dataclass(frozen=True)
class Survey:
    """What is in a selection, and what is done with each of its documents."""

    selection: Selection
    digests: np.ndarray[Any, np.dtype[np.uint64]]
    place: np.ndarray[Any, np.dtype[np.uint8]]  # TRAIN, HELD_OUT or DROPPED
    empty: int
    bytes: int

    @property
    def duplicates(self) -> int:
        return int((self.place == DROPPED).sum())

    def documents(self) -> Iterator[tuple[Document, int]]:
        """The documents once more, each with its place."""
        for number, (_, document) in enumerate(self.selection.read()):
            if number >= len(self.digests) or _digest(document) != int(self.digests[number]):
                raise DataError("the text was changed while it was read: start again")
            if self.place[number] != DROPPED:
                yield document, int(self.place[number])


def survey(selection: Selection, progress: Progress | None = None) -> Survey:
    """Look through all documents."""
    digests, apart = array("Q"), array("B")
    empty = total = 0
    for file, document in selection.read(with_empty=True):
        if document.is_empty:
            empty += 1
            continue
        content = document.content()
        digests.append(_hash(content))
        apart.append(file.held_out)
        total += len(content)
        if progress is not None and len(digests) % 64 == 0:
            progress("reading", total, 0)
    if not digests:
        files = selection.files
        what = f"{files[0]} is empty" if len(files) == 1 else f"none of {len(files)} files has any"
        raise DataError(f"there is no text to learn from: {what}")
    hashes = np.frombuffer(digests, np.uint64)
    set_apart = np.frombuffer(apart, np.uint8).astype(bool)
    place = _places(hashes, set_apart, selection.share, selection.seed)
    return Survey(selection, hashes, place, empty, total)


def _digest(document: Document) -> int:
    return _hash(document.content())


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _places(
    digests: np.ndarray[Any, np.dtype[np.uint64]],
    apart: np.ndarray[Any, np.dtype[np.bool_]],
    share: float,
    seed: int,
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    place = np.full(len(digests), DROPPED, np.uint8)
    # Of equal documents the first is kept, and one that is set apart before one that is not: what
    # a model is judged by, it must not have learned.
    order = np.argsort(~apart, kind="stable")
    _, first = np.unique(digests[order], return_index=True)
    kept = np.sort(order[first])
    place[kept] = TRAIN
    if apart.any():
        place[kept[apart[kept]]] = HELD_OUT
    elif share > 0 and len(kept) > 1:
        count = max(round(share * len(kept)), _FEWEST_HELD_OUT)
        count = min(count, max(1, len(kept) // 4))
        drawn = mixed(digests[kept] ^ np.uint64(_hash(str(seed).encode())))
        place[kept[np.argsort(drawn)[:count]]] = HELD_OUT
    if not (place == TRAIN).any():
        raise DataError("nothing is left to train on: all documents are held out")
    return place
