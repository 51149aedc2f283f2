"""The text that a model is judged by: a source that somebody names, or what a run held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from unspool.errors import SettingsError
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.shards import Prepared
from unspool.train.data.sources import documents
from unspool.train.running.runs import Run


def texts_of(
    source: Sequence[str], *, field: str | None = None, limit: int | None = None
) -> Iterator[str]:
    """The documents of a source as texts; a long one is whole, however it was read."""
    begun: list[str] = []
    done = 0
    for document in documents(list(source), field=field):
        begun.append(_text(document))
        if document.ends:
            yield "".join(begun)
            begun, done = [], done + 1
        if limit is not None and done >= limit:
            return
    if begun:
        yield "".join(begun)


def _text(document: Any) -> str:
    if document.text is not None:
        return str(document.text)
    if document.pieces is not None:
        return "".join(text for text, _ in document.pieces)
    raise SettingsError(
        "conversations have no bits per byte, as a template writes part of them; give plain text"
    )


def held_out_texts(run: Run, *, limit: int | None = None) -> Iterator[str]:
    """What a run kept apart from its training."""
    folder = Path(str(run.facts.get("data", {}).get("folder", "")))
    if not (folder / "card.json").exists():
        raise SettingsError(
            f"the data of {run.name} is no longer on this machine; name a text with --data"
        )
    packed = Prepared.open(folder).held_out
    vocabulary = run.folder / "tokenizer"
    tokenizer = Tokenizer.from_file(vocabulary if vocabulary.exists() else run.model or run.folder)
    for number in range(min(packed.documents, limit or packed.documents)):
        start, end = packed.borders[number], packed.borders[number + 1]
        yield tokenizer.decode(map(int, packed.ids[start:end]), specials=False)
