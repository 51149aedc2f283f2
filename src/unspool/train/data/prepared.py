"""Prepared data: documents encoded once into shards, with their statistics."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unspool.errors import DataError, UnspoolError
from unspool.model.hub.download import cache_folder
from unspool.text.chat.template import ChatTemplate, mask_conversation
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.selection import HELD_OUT, TRAIN, Progress, Survey, select, survey
from unspool.train.data.sources import Document, Source

# -- Statistics of prepared data, kept beside it and in each run that used it


@dataclass(frozen=True)
class DataCard:
    """Statistics of one prepared data set; `held_out_*` fields describe the evaluation split."""

    source: list[str]
    kind: str  # "text": packed windows; "chat": one conversation per row
    documents: int
    tokens: int
    bytes: int
    counted_tokens: int  # tokens in the loss
    held_out_documents: int
    held_out_tokens: int
    held_out_bytes: int
    duplicates: int  # documents dropped as duplicates
    empty: int  # documents dropped as empty
    longest: int  # tokens of the longest document
    vocab_size: int
    tokenizer: str  # hash of its files
    dtype: str
    seed: int

    @property
    def bytes_per_token(self) -> float:
        """Average UTF-8 bytes per token in the training split."""
        return self.bytes / max(1, self.tokens)

    @property
    def held_out_bytes_per_token(self) -> float:
        return self.held_out_bytes / max(1, self.held_out_tokens)

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "bytes_per_token": round(self.bytes_per_token, 4),
            "held_out_bytes_per_token": round(self.held_out_bytes_per_token, 4),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> DataCard:
        return cls(**{name: content[name] for name in cls.__dataclass_fields__})

    def rows(self) -> list[list[str]]:
        """The statistics as (label, text) rows for display."""
        tokens = f"{self.tokens:,}"
        if self.counted_tokens != self.tokens:
            tokens += f", {self.counted_tokens:,} of them in the loss"
        return [
            ["source", ", ".join(self.source)],
            ["documents", f"{self.documents:,}, the longest has {self.longest:,} tokens"],
            ["tokens", tokens],
            ["bytes", f"{self.bytes:,}"],
            ["bytes per token", f"{self.bytes_per_token:.2f}"],
            [
                "held out",
                f"{self.held_out_documents:,} documents, {self.held_out_tokens:,} tokens,"
                f" {self.held_out_bytes_per_token:.2f} bytes per token",
            ],
            ["dropped", f"{self.duplicates:,} duplicates, {self.empty:,} empty"],
            ["vocabulary", f"{self.vocab_size:,} tokens, stored as {self.dtype}"],
        ]


def build_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Return the folder `target`, building it with `make(temporary_folder)` if it is missing.

    The temporary folder is synced to disk and then renamed, so readers never see a partial one.
    Other processes wait on a file lock while one builds.
    """
    from filelock import FileLock

    if target.is_dir():
        return target
    root = target.parent
    with _disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{target.name}.lock"):
            if not target.is_dir():
                _make_atomically(target, make)
    return target


def _make_atomically(target: Path, make: Callable[[Path], None]) -> None:
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)  # left by a killed process
    part.mkdir()
    try:
        make(part)
        for path in part.rglob("*"):
            if path.is_file():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    """Turn an error of the disk into one line that says what to do."""
    try:
        yield
    except OSError as error:
        reason = f"{root} cannot be written ({error.strerror or error})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"the disk is full at {root}: free some space"
        raise DataError(f"{reason}, or set UNSPOOL_CACHE to another folder") from None


_CHUNK_CHARACTERS = 1_000_000  # encoded together, on all cores


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """Token ids of one document."""

    ids: np.ndarray[Any, np.dtype[np.uint32]]
    loss_mask: np.ndarray[Any, np.dtype[np.bool_]] | None  # None: all ids are in the loss
    bytes: int  # of its text in UTF-8


class DocumentEncoder:
    """Encodes documents with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self._chat = ChatTemplate(tokenizer.chat_template, tokenizer)
        bos = tokenizer.bos_id if tokenizer.add_bos else None
        self._start = [] if bos is None else [bos]
        self._end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]

    def encode(
        self, documents: Iterable[tuple[Document, int]]
    ) -> Iterator[tuple[EncodedDocument, int]]:
        """Encode (document, split) pairs in order; the split is passed through."""
        chunk: list[tuple[Document, int]] = []
        size = 0
        for document, split in documents:
            chunk.append((document, split))
            size += len(document.text or "")
            if size >= _CHUNK_CHARACTERS or len(chunk) >= 4096:
                yield from self._encode_chunk(chunk)
                chunk, size = [], 0
        yield from self._encode_chunk(chunk)

    def _encode_chunk(
        self, documents: list[tuple[Document, int]]
    ) -> Iterator[tuple[EncodedDocument, int]]:
        texts = [doc.text for doc, _ in documents if doc.text is not None]
        encoded = iter(self.tokenizer.encode_batch(texts))
        for document, split in documents:
            if document.text is not None:
                yield self._encode_text(document, next(encoded)), split
            else:
                yield self._encode_conversation(document), split

    def _encode_text(self, document: Document, ids: list[int]) -> EncodedDocument:
        start = self._start if document.is_start else []
        ids = start + ids + (self._end if document.is_end else [])
        return EncodedDocument(np.array(ids, np.uint32), None, len((document.text or "").encode()))

    def _encode_conversation(self, document: Document) -> EncodedDocument:
        if document.messages is not None:
            return self._encode_messages(document.messages, document.tools)
        assert document.pieces is not None
        (prompt, _), (completion, _) = document.pieces
        if not self._chat.is_plain:
            return self._encode_messages(
                [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}],
                None,
            )
        before = self._start + self.tokenizer.encode(prompt)
        after = self.tokenizer.encode(completion) + self._end
        loss_mask = np.arange(len(before) + len(after)) >= len(before)
        return EncodedDocument(
            np.array(before + after, np.uint32), loss_mask, len((prompt + completion).encode())
        )

    def _encode_messages(
        self, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> EncodedDocument:
        try:
            lesson = mask_conversation(self._chat, messages, tools, self.tokenizer.end_ids)
        except UnspoolError as error:
            start = str(messages[0].get("content"))[:40]
            raise DataError(f"the conversation that starts with {start!r}: {error}") from None
        ids, loss_mask = lesson.ids, lesson.loss_mask
        if self._chat.is_plain:  # without a template nothing marks the end of a conversation
            ids, loss_mask = ids + self._end, loss_mask + [True] * len(self._end)
        return EncodedDocument(
            np.array(ids, np.uint32), np.array(loss_mask, bool), len(lesson.text.encode())
        )


def fingerprint(tokenizer: Tokenizer) -> str:
    """Hash of a tokenizer's files: equal hashes encode equally."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        digest = hashlib.sha256()
        for file in sorted(Path(folder).iterdir()):
            digest.update(file.read_bytes())
    return digest.hexdigest()


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
