"""`unspool train tokenizer`: learn a vocabulary from text, merge by merge."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unspool.cli import options as o
from unspool.cli.train import source as s

if TYPE_CHECKING:
    from unspool.train.data.survey import Selection
    from unspool.train.data.tokenizer import TokenizerSettings


def tokenizer(
    source: s.Sources = None,
    vocab_size: Annotated[int, typer.Option(help="How many tokens, the special ones too.")] = 4096,
    pretokenizer: s.PreTokenizer = "qwen2",
    special: Annotated[
        list[str] | None, typer.Option(help="One more special token; may be given several times.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja file in place of ChatML.", dir_okay=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A folder to put its files into.")
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
    """Learn a tokenizer from text: byte-level byte-pair encoding.

    [b]Examples[/b]

      unspool train tokenizer --vocab-size 4096 --out my-tokenizer
      unspool train tokenizer notes.txt --vocab-size 300 --show
    """
    from unspool.errors import DataError
    from unspool.train.data.sources import DEFAULT_SOURCE
    from unspool.train.data.survey import select
    from unspool.train.data.tokenizer import SPECIALS, TokenizerSettings, tokenizer_of

    settings = TokenizerSettings(
        vocab_size, pretokenizer, (*SPECIALS, *(special or ())), _template(chat_template)
    )
    chosen = select(
        source or [DEFAULT_SOURCE], field=field, limit=limit,
        held_out=s.share_or_source(held_out), seed=seed, offline=offline,
    )  # fmt: skip
    learned = _show_merges(chosen, settings) if show else None
    with s.reading_bar() as progress:
        made = tokenizer_of(chosen, settings, progress)
    if learned is not None and learned != made.merges():
        raise DataError("the library learned other merges than those shown: please report this")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(made.folder / name, out / name)
    print(
        f"{made.tokenizer.vocab_size:,} tokens, {made.bytes_per_token:.2f} bytes per token on text"
        f" that was held out: {out or made.folder}"
    )


def _template(file: Path | None) -> str:
    from unspool.errors import DataError
    from unspool.train.data.chat_template import CHAT_TEMPLATE

    if file is None:
        return CHAT_TEMPLATE
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from None


def _show_merges(chosen: Selection, settings: TokenizerSettings) -> list[tuple[bytes, bytes]]:
    """Learn the merges plainly, and show each with how often its two pieces stood together."""
    from unspool.cli.show import quoted
    from unspool.text.tokenizer.characters import readable
    from unspool.text.tokenizer.learning import learn_merges
    from unspool.train.data.survey import TRAIN, survey
    from unspool.train.data.tokenizer import count_words, texts_of

    with s.reading_bar() as progress:
        found = survey(chosen, progress)
        texts = texts_of(found, TRAIN, settings.most_bytes, progress)
        words = count_words(texts, settings.pretokenizer)
    first = 256 + len(settings.specials)
    print(f"{sum(words.values()):,} words, {len(words):,} different ones")
    learned = []
    for merge in learn_merges(words, settings.vocab_size - first):
        left, right = (quoted(readable(piece)) for piece in merge.pair)
        joined = quoted(readable(merge.piece))
        print(f"{first + merge.number:>7}  {merge.count:>10,}  {left} + {right} → {joined}")
        learned.append(merge.pair)
    return learned
