"""Which documents are used: a stateless shuffle, a share of the source, and a survey of it."""

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
from unspool.model.hub.download import file_sha256
from unspool.train.data.sources import Document, Source, SourceFile, read_documents, source_files

# -- A stateless shuffle: a permutation computed from a key, the same on every machine

Numbers = np.ndarray[Any, np.dtype[np.uint64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]


def permuted(positions: Indices, count: int, key: str) -> Indices:
    """Map positions in 0..count-1 to their positions in the permutation given by `key`.

    A Feistel network: each round mixes half of the bits into the other half, which is invertible
    and therefore a permutation. It works on the next power of four; results >= count are mapped
    again until they fit. No library's random generator is involved, so the order never changes.
    """
    half = max(1, -(-int(count - 1).bit_length() // 2))
    mask = np.uint64((1 << half) - 1)
    keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=48).digest(), np.uint64)
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        high, low = values[outside] >> np.uint64(half), values[outside] & mask
        for round_key in keys:
            high, low = low, high ^ (mixed(low + round_key) & mask)
        values[outside] = (high << np.uint64(half)) | low
        outside = values >= count
    return values.astype(np.int64)


def mixed(numbers: Numbers) -> Numbers:
    """SplitMix64's finalizer: each output bit depends on each input bit."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(numbers ^ (numbers >> np.uint64(31)))


Progress = Callable[[str, int, int], None]  # (activity, bytes done, bytes in all or 0)

TRAIN, HELD_OUT, DROPPED = 0, 1, 2

_MIN_HELD_OUT = 4
_READER_VERSION = 1  # of how documents are read; part of the cache key


@dataclass(frozen=True)
class Selection:
    """The files of a source and how to split their documents."""

    names: tuple[str, ...]  # of the sources, as the caller wrote them
    files: tuple[SourceFile, ...]
    field: str | None
    limit: int | None
    share: float  # of documents to hold out, unless a file is the evaluation split
    seed: int

    def content_hash(self) -> str:
        """Hash of the files' bytes and of the settings."""
        contents = {path: file_sha256(path) for path in {file.path for file in self.files}}
        files = [
            (contents[file.path], file.member, file.kind, file.held_out, file.part_size)
            for file in self.files
        ]
        content = [_READER_VERSION, files, self.field, self.limit, self.share, self.seed]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def read(self, *, with_empty: bool = False) -> Iterator[tuple[SourceFile, Document]]:
        """Yield the documents; `limit` counts those of training files."""
        remaining = -1 if self.limit is None else self.limit
        for file in self.files:
            for document in read_documents(file, self.field):
                if document.is_empty and not with_empty:
                    continue
                if not file.held_out and not document.is_empty:
                    if remaining == 0:
                        break
                    remaining -= 1
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
    """Resolve a source; `held_out` is a share of the documents (at least 4) or another source."""
    names = [source] if isinstance(source, str | Path) else source
    files = source_files(source, offline=offline)
    share = float(held_out) if isinstance(held_out, int | float) else 0.0
    if not isinstance(held_out, int | float):
        files = [file for file in files if not file.held_out]
        held_out_files = source_files(held_out, offline=offline)
        files += [replace(file, held_out=True) for file in held_out_files]
    if not 0 <= share < 1:
        raise SettingsError(f"held_out must be >= 0 and < 1, got {share}")
    return Selection(tuple(map(str, names)), tuple(files), field, limit, share, seed)


@dataclass(frozen=True)
class Survey:
    """The documents of a selection and the split of each."""

    selection: Selection
    digests: np.ndarray[Any, np.dtype[np.uint64]]
    splits: np.ndarray[Any, np.dtype[np.uint8]]  # TRAIN, HELD_OUT or DROPPED
    empty: int
    bytes: int

    @property
    def duplicates(self) -> int:
        return int((self.splits == DROPPED).sum())

    def documents(self) -> Iterator[tuple[Document, int]]:
        """Read the documents again and yield each with its split."""
        for number, (_, document) in enumerate(self.selection.read()):
            changed = number >= len(self.digests)
            if changed or _hash(document.content()) != int(self.digests[number]):
                raise DataError("the data changed while it was read: start again")
            if self.splits[number] != DROPPED:
                yield document, int(self.splits[number])


def survey(selection: Selection, progress: Progress | None = None) -> Survey:
    """Read all documents once and assign each to a split."""
    digests, held_out = array("Q"), array("B")
    empty = total = 0
    for file, document in selection.read(with_empty=True):
        if document.is_empty:
            empty += 1
            continue
        content = document.content()
        digests.append(_hash(content))
        held_out.append(file.held_out)
        total += len(content)
        if progress is not None and len(digests) % 64 == 0:
            progress("reading", total, 0)
    if not digests:
        files = selection.files
        one_file = len(files) == 1
        reason = f"{files[0]} is empty" if one_file else f"none of {len(files)} files has any"
        raise DataError(f"there is no text to learn from: {reason}")
    hashes = np.frombuffer(digests, np.uint64)
    in_held_out_file = np.frombuffer(held_out, np.uint8).astype(bool)
    splits = _assign(hashes, in_held_out_file, selection.share, selection.seed)
    return Survey(selection, hashes, splits, empty, total)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _assign(
    digests: np.ndarray[Any, np.dtype[np.uint64]],
    in_held_out_file: np.ndarray[Any, np.dtype[np.bool_]],
    share: float,
    seed: int,
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The split of each document."""
    splits = np.full(len(digests), DROPPED, np.uint8)
    # The first of equal documents stays, a held-out one before a training one: a model must not be
    # trained on what it is evaluated with.
    order = np.argsort(~in_held_out_file, kind="stable")
    _, first = np.unique(digests[order], return_index=True)
    unique = np.sort(order[first])
    splits[unique] = TRAIN
    if in_held_out_file.any():
        splits[unique[in_held_out_file[unique]]] = HELD_OUT
    elif share > 0 and len(unique) > 1:
        count = max(round(share * len(unique)), _MIN_HELD_OUT)
        count = min(count, max(1, len(unique) // 4))
        random_keys = mixed(digests[unique] ^ np.uint64(_hash(str(seed).encode())))
        splits[unique[np.argsort(random_keys)[:count]]] = HELD_OUT
    if not (splits == TRAIN).any():
        raise DataError("there is nothing to train on: all documents are held out")
    return splits
