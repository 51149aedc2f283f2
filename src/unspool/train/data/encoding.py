"""Encode documents to token ids and a loss mask.

A text starts with the BOS token, if the tokenizer adds one, and ends with the EOS token; all its
tokens are in the loss. In a conversation only the assistant's tokens are, end of turn included.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unspool.errors import DataError, UnspoolError
from unspool.text.chat.learning import mask_conversation
from unspool.text.chat.template import ChatTemplate
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.shapes import Document

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
                [
                    {"role": "user", "content": prompt},
                    {"role": "assistant", "content": completion},
                ],
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
