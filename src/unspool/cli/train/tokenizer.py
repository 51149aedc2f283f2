"""`unspool train tokenizer`: train a BPE tokenizer on text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unspool.cli import options as o
from unspool.cli.train import source as s

if TYPE_CHECKING:
    from unspool.train.data.selection import Selection
    from unspool.train.data.tokenizer import TokenizerSettings


def tokenizer(
    source: s.Sources = None,
    vocab_size: Annotated[
        int, typer.Option(help="Number of tokens, special ones included.")
    ] = 4096,
    pretokenizer: s.PreTokenizer = "qwen2",
    special: Annotated[
        list[str] | None, typer.Option(help="An additional special token; repeatable.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja chat template instead of ChatML.", dir_okay=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Output folder. Default: the cache.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Show the merges as they are learned.")
    ] = False,
    held_out: s.HeldOut = "0.01",
    field: s.Field = None,
    limit: s.Limit = None,
    seed: s.Seed = 0,
    offline: o.Offline = False,
) -> None:
    """Train a tokenizer on text: byte-level byte-pair encoding (BPE).

    [b]Examples[/b]

      unspool train tokenizer --vocab-size 4096 --out my-tokenizer
      unspool train tokenizer notes.txt --vocab-size 300 --show
    """
    from unspool.errors import DataError
    from unspool.train.data.selection import select
    from unspool.train.data.sources import DEFAULT_SOURCE
    from unspool.train.data.tokenizer import SPECIALS, TokenizerSettings, tokenizer_for

    settings = TokenizerSettings(
        vocab_size, pretokenizer, (*SPECIALS, *(special or ())), _template(chat_template)
    )
    selection = select(
        source or [DEFAULT_SOURCE], field=field, limit=limit,
        held_out=s.share_or_source(held_out), seed=seed, offline=offline,
    )  # fmt: skip
    merges = _show_merges(selection, settings) if show else None
    with s.reading_bar() as progress:
        result = tokenizer_for(selection, settings, progress)
    if merges is not None and merges != result.merges():
        raise DataError("the library learned different merges: please report this")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(result.folder / name, out / name)
    print(
        f"{result.tokenizer.vocab_size:,} tokens, {result.bytes_per_token:.2f} bytes per token on"
        f" held-out text: {out or result.folder}"
    )


def _template(file: Path | None) -> str:
    from unspool.errors import DataError
    from unspool.train.data.tokenizer import CHAT_TEMPLATE

    if file is None:
        return CHAT_TEMPLATE
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from None


def _show_merges(selection: Selection, settings: TokenizerSettings) -> list[tuple[bytes, bytes]]:
    """Learn the merges step by step, and print each with the count of its pair."""
    from unspool.cli.show import quoted
    from unspool.text.tokenizer.bpe import learn_merges
    from unspool.text.tokenizer.pieces import readable
    from unspool.train.data.selection import TRAIN, survey
    from unspool.train.data.tokenizer import count_words, iter_texts

    with s.reading_bar() as progress:
        texts = iter_texts(survey(selection, progress), TRAIN, settings.most_bytes, progress)
        words = count_words(texts, settings.pretokenizer)
    first = 256 + len(settings.specials)
    print(f"{sum(words.values()):,} words, {len(words):,} distinct")
    merges = []
    for merge in learn_merges(words, settings.vocab_size - first):
        pair = " + ".join(quoted(readable(piece)) for piece in merge.pair)
        joined = quoted(readable(merge.piece))
        print(f"{first + merge.number:>7}  {merge.count:>10,}  {pair} → {joined}")
        merges.append(merge.pair)
    return merges
