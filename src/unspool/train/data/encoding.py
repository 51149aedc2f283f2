"""Documents to ids, and which of them count for the loss.

A text begins with the start token, if the vocabulary wants one, and ends with the end token; all of
it counts. Of a conversation only what the assistant writes counts, its end of turn included.
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
from unspool.text.chat.learning import counted_tokens
from unspool.text.chat.template import ChatTemplate
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.shapes import Document

_AT_ONCE = 1_000_000  # characters that are encoded at once, by all cores


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document as ids."""

    ids: np.ndarray[Any, np.dtype[np.uint32]]
    counted: np.ndarray[Any, np.dtype[np.bool_]] | None  # None: all of them
    bytes: int  # of its text


class DocumentEncoder:
    """Encodes documents with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self._chat = ChatTemplate(tokenizer.chat_template, tokenizer)
        bos = tokenizer.bos_id if tokenizer.add_bos else None
        self._start = [] if bos is None else [bos]
        self._end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]

    def encode(self, documents: Iterable[tuple[Document, int]]) -> Iterator[tuple[Encoded, int]]:
        """Each document as ids, in order; the number beside it is passed on."""
        together: list[tuple[Document, int]] = []
        size = 0
        for document, place in documents:
            together.append((document, place))
            size += len(document.text or "")
            if size >= _AT_ONCE or len(together) >= 4096:
                yield from self._encode(together)
                together, size = [], 0
        yield from self._encode(together)

    def _encode(self, documents: list[tuple[Document, int]]) -> Iterator[tuple[Encoded, int]]:
        texts = [doc.text for doc, _ in documents if doc.text is not None]
        encoded = iter(self.tokenizer.encode_batch(texts))
        for document, place in documents:
            if document.text is not None:
                yield self._text(document, next(encoded)), place
            else:
                yield self._conversation(document), place

    def _text(self, document: Document, ids: list[int]) -> Encoded:
        start = self._start if document.begins else []
        whole = start + ids + (self._end if document.ends else [])
        return Encoded(np.array(whole, np.uint32), None, len((document.text or "").encode()))

    def _conversation(self, document: Document) -> Encoded:
        if document.messages is not None:
            return self._messages(document.messages, document.tools)
        assert document.pieces is not None
        (prompt, _), (completion, _) = document.pieces
        if not self._chat.is_plain:
            return self._messages(
                [
                    {"role": "user", "content": prompt},
                    {"role": "assistant", "content": completion},
                ],
                None,
            )
        before = self._start + self.tokenizer.encode(prompt)
        after = self.tokenizer.encode(completion) + self._end
        counted = np.arange(len(before) + len(after)) >= len(before)
        return Encoded(
            np.array(before + after, np.uint32), counted, len((prompt + completion).encode())
        )

    def _messages(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Encoded:
        try:
            found = counted_tokens(self._chat, messages, tools, self.tokenizer.end_ids)
        except UnspoolError as error:
            start = str(messages[0].get("content"))[:40]
            raise DataError(f"the conversation that begins with {start!r}: {error}") from None
        ids, counted = found.ids, found.counted
        if self._chat.is_plain:  # nothing in plain lines ends a conversation
            ids, counted = ids + self._end, counted + [True] * len(self._end)
        return Encoded(np.array(ids, np.uint32), np.array(counted, bool), len(found.text.encode()))


def fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of all that a tokenizer is: two that are alike encode alike."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        digest = hashlib.sha256()
        for file in sorted(Path(folder).iterdir()):
            digest.update(file.read_bytes())
    return digest.hexdigest()
