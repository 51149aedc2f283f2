"""`unspool train data` and `unspool train tokenizer`: prepare text, train a BPE tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unspool.cli import options as o
from unspool.cli.output import piece_style, print_columns, print_json, stdout_console, visible
from unspool.cli.train import options as s
from unspool.errors import DataError

if TYPE_CHECKING:
    from unspool.text.tokenizer.tokenizer import Tokenizer
    from unspool.train.data.prepared import PackedDocuments
    from unspool.train.data.selection import Selection
    from unspool.train.data.tokenizer import TokenizerSettings

_MAX_SHOWN_TOKENS = 2000  # of a document


def data(
    source: s.Sources = None,
    model: o.Model = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="A tokenizer. Default: train one.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Vocabulary size of a new tokenizer.")] = 4096,
    held_out: s.HeldOut = "0.01",
    field: s.Field = None,
    limit: s.Limit = None,
    seed: s.Seed = 0,
    show: Annotated[
        int, typer.Option(min=0, help="Show n documents, with the tokens in the loss in colour.")
    ] = 0,
    as_json: o.Json = False,
    offline: o.Offline = False,
) -> None:
    """Prepare text for training: tokenize it, drop duplicates, hold out documents.

    The result is cached. Training does this by itself; this command shows the statistics before.

    [b]Examples[/b]

      unspool train data
      unspool train data books/ --vocab-size 8192
      unspool train data chats.jsonl --model default --show 1
    """
    from unspool.cli.inspection import open_vocabulary
    from unspool.train.data.prepared import prepare
    from unspool.train.data.sources import DEFAULT_SOURCE
    from unspool.train.data.tokenizer import TokenizerSettings, make_tokenizer

    names, split = source or [DEFAULT_SOURCE], s.share_or_source(held_out)
    with s.reading_bar() as progress:
        if model is None and tokenizer is None:
            vocabulary = make_tokenizer(
                names, TokenizerSettings(vocab_size), field=field, limit=limit, held_out=split,
                seed=seed, progress=progress, offline=offline,
            ).tokenizer  # fmt: skip
        else:
            vocabulary = open_vocabulary(model, tokenizer, offline)
        prepared = prepare(
            names, vocabulary, field=field, limit=limit, held_out=split, seed=seed,
            progress=progress, offline=offline,
        )  # fmt: skip
    if as_json:
        print_json({**prepared.card.to_json(), "folder": str(prepared.folder)})
        return
    print_columns([*prepared.card.rows(), ["folder", str(prepared.folder)]])
    for number in range(min(show, prepared.train.num_documents)):
        print()
        _show_document(prepared.train, number, vocabulary)


def _show_document(packed: PackedDocuments, number: int, tokenizer: Tokenizer) -> None:
    """Print a document; tokens in the loss are coloured."""
    from rich.text import Text

    from unspool.text.tokenizer.pieces import readable_pieces

    start, end = packed.offsets[number : number + 2].tolist()
    end = min(end, start + _MAX_SHOWN_TOKENS)
    pieces = readable_pieces(
        [tokenizer.token_bytes(token) for token in packed.ids[start:end].tolist()]
    )
    line = Text()
    for index, piece in enumerate(pieces, start=start):
        in_loss = packed.loss_mask is None or packed.loss_mask[index]
        line.append(piece, piece_style(index) if in_loss else "dim")
    stdout_console().print(line)


# -- tokenizer -------------------------------------------------------------------------------------


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
    from unspool.train.data.tokenizer import CHAT_TEMPLATE

    if file is None:
        return CHAT_TEMPLATE
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from None


def _show_merges(selection: Selection, settings: TokenizerSettings) -> list[tuple[bytes, bytes]]:
    """Learn the merges step by step, and print each with the count of its pair."""
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
        pair = " + ".join(visible(readable(piece)) for piece in merge.pair)
        joined = visible(readable(merge.piece))
        print(f"{first + merge.number:>7}  {merge.count:>10,}  {pair} → {joined}")
        merges.append(merge.pair)
    return merges
