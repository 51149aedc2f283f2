"""Texts for evaluation: a data source, or the held-out split of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from unspool.errors import SettingsError
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.shards import PreparedData
from unspool.train.data.sources import documents
from unspool.train.running.runs import Run


def source_texts(
    source: Sequence[str], *, field: str | None = None, limit: int | None = None
) -> Iterator[str]:
    """Yield the documents of a source as texts; the parts of a long one are joined."""
    parts: list[str] = []
    done = 0
    for document in documents(list(source), field=field):
        parts.append(_document_text(document))
        if document.is_end:
            yield "".join(parts)
            parts, done = [], done + 1
        if limit is not None and done >= limit:
            return
    if parts:
        yield "".join(parts)


def _document_text(document: Any) -> str:
    if document.text is not None:
        return str(document.text)
    if document.pieces is not None:
        return "".join(text for text, _ in document.pieces)
    raise SettingsError(
        "bits per byte need plain text, not conversations, which are partly written by a template"
    )


def held_out_texts(run: Run, *, limit: int | None = None) -> Iterator[str]:
    """Yield the held-out texts of a run."""
    folder = Path(str(run.facts.get("data", {}).get("folder", "")))
    if not (folder / "card.json").exists():
        raise SettingsError(
            f"the data of {run.name} is not on this machine; give a text with --data"
        )
    packed = PreparedData.open(folder).held_out
    vocabulary = run.folder / "tokenizer"
    tokenizer = Tokenizer.from_file(vocabulary if vocabulary.exists() else run.model or run.folder)
    for number in range(min(packed.num_documents, limit or packed.num_documents)):
        start, end = packed.offsets[number], packed.offsets[number + 1]
        yield tokenizer.decode(map(int, packed.ids[start:end]), specials=False)
