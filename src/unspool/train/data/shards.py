"""Documents prepared for training: ids in memory-mapped files, made once and found again.

    prepared = prepare("sotu", tokenizer)
    prepared.train.ids[:100], prepared.train.borders[:3], prepared.card

What was prepared lies in a folder that is called by a hash of all that it depends on: the source's
bytes, the tokenizer, the settings.

    card.json          what is in it, in figures
    train.ids          all ids, one document behind the other, uint16 or uint32
    train.borders      where each document begins, int64, and behind the last where it ends
    train.counted      one byte for each id: does it count for the loss? (only where some do not)
    held_out.*         the same for what is held out
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
from unspool.train.data.encoding import DocumentEncoder, Encoded, fingerprint
from unspool.train.data.made_once import made_once
from unspool.train.data.sources import Source
from unspool.train.data.survey import HELD_OUT, TRAIN, Progress, Survey, select, survey

_VERSION = 1  # of the files' layout; another one is prepared anew
_PARTS = {TRAIN: "train", HELD_OUT: "held_out"}


@dataclass(frozen=True)
class Packed:
    """Documents one behind the other."""

    ids: np.ndarray[Any, np.dtype[Any]]  # uint16 or uint32, memory-mapped
    borders: np.ndarray[Any, np.dtype[np.int64]]  # where each document begins; last: the end
    counted: np.ndarray[Any, np.dtype[np.bool_]] | None  # None: every id counts

    @property
    def documents(self) -> int:
        return len(self.borders) - 1


@dataclass(frozen=True)
class Prepared:
    """Prepared data, opened from its folder."""

    folder: Path
    card: DataCard
    train: Packed
    held_out: Packed

    @classmethod
    def open(cls, folder: str | Path) -> Prepared:
        folder = Path(folder)
        try:
            card = DataCard.from_json(json.loads((folder / "card.json").read_text("utf-8")))
            train, held_out = (_open_part(folder, name, card) for name in _PARTS.values())
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{folder} does not hold prepared data ({error}): delete it and prepare it again"
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
) -> Prepared:
    """Prepare a source for training with this tokenizer, or find what was prepared before.

    `held_out` is the share of the documents that are kept apart to judge by (at least a few of
    them), or a source of its own. `folder` is where prepared data is kept; usually the cache.
    """
    chosen = select(source, field=field, limit=limit, held_out=held_out, seed=seed, offline=offline)
    of_tokenizer = fingerprint(tokenizer)
    everything = f"{_VERSION} {chosen.content_hash()} {of_tokenizer}"
    root = Path(folder) if folder is not None else cache_folder() / "prepared"

    def make(fresh: Path) -> None:
        card = _write(fresh, survey(chosen, progress), tokenizer, of_tokenizer, progress)
        (fresh / "card.json").write_text(
            json.dumps(card.to_json(), indent=2, ensure_ascii=False), encoding="utf-8"
        )

    name = hashlib.sha256(everything.encode()).hexdigest()[:32]
    return Prepared.open(made_once(root / name, make))


def _write(
    folder: Path,
    found: Survey,
    tokenizer: Tokenizer,
    of_tokenizer: str,
    progress: Progress | None,
) -> DataCard:
    encoder = DocumentEncoder(tokenizer)
    parts = {n: _PartWriter(folder, name, encoder.dtype) for n, name in _PARTS.items()}
    done = 0
    for encoded, place in encoder.encode(found.documents()):
        parts[place].add(encoded)
        done += encoded.bytes
        if progress is not None:
            progress("encoding", min(done, found.bytes), found.bytes)
    for part in parts.values():
        part.close()
    train, held_out = parts[TRAIN], parts[HELD_OUT]
    return DataCard(
        source=list(found.selection.names),
        kind="chat" if train.some_do_not_count else "text",
        documents=train.documents, tokens=train.tokens, bytes=train.bytes,
        counted_tokens=train.counted_tokens,
        held_out_documents=held_out.documents, held_out_tokens=held_out.tokens,
        held_out_bytes=held_out.bytes,
        duplicates=found.duplicates, empty=found.empty, longest=train.longest,
        vocab_size=tokenizer.vocab_size, tokenizer=of_tokenizer,
        dtype=encoder.dtype.name, seed=found.selection.seed,
    )  # fmt: skip


class _PartWriter:
    """Writes the files of one part, document by document."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any]) -> None:
        self._ids, self._borders, self._counted = (
            (folder / f"{name}.{end}").open("wb") for end in ("ids", "borders", "counted")
        )
        self._dtype = dtype
        self.documents = self.tokens = self.bytes = self.counted_tokens = self.longest = 0
        self.some_do_not_count = False

    def add(self, document: Encoded) -> None:
        count = len(document.ids)
        self._borders.write(np.int64(self.tokens).tobytes())
        self._ids.write(document.ids.astype(self._dtype).tobytes())
        counted = np.ones(count, bool) if document.counted is None else document.counted
        self._counted.write(counted.tobytes())
        self.some_do_not_count |= document.counted is not None
        self.documents += 1
        self.tokens += count
        self.bytes += document.bytes
        self.counted_tokens += int(counted.sum())
        self.longest = max(self.longest, count)

    def close(self) -> None:
        self._borders.write(np.int64(self.tokens).tobytes())
        for file in (self._ids, self._borders, self._counted):
            file.close()
        if not self.some_do_not_count:
            Path(self._counted.name).unlink()


def _open_part(folder: Path, name: str, card: DataCard) -> Packed:
    def mapped(end: str, dtype: Any) -> np.ndarray[Any, np.dtype[Any]]:
        file = folder / f"{name}.{end}"
        if file.stat().st_size == 0:  # nothing cannot be mapped
            return np.zeros(0, dtype)
        return np.memmap(file, dtype, "r")

    borders = mapped("borders", np.int64)
    ids = mapped("ids", card.dtype)
    if len(ids) != borders[-1]:
        raise ValueError(f"{name} has {len(ids)} ids, not {borders[-1]}")
    counted = mapped("counted", np.bool_) if (folder / f"{name}.counted").is_file() else None
    return Packed(ids, borders, counted)
