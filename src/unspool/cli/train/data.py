"""`unspool train data`: prepare text for training, and show what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from unspool.cli import options as o
from unspool.cli.train import source as s

if TYPE_CHECKING:
    from unspool.text.tokenizer.tokenizer import Tokenizer
    from unspool.train.data.shards import Packed

_MOST_SHOWN = 2000  # tokens of a document


def data(
    source: s.Sources = None,
    model: o.Model = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="A tokenizer; else one is made.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Tokens of the one that is made.")] = 4096,
    held_out: s.HeldOut = "0.01",
    field: s.Field = None,
    limit: s.Limit = None,
    seed: s.Seed = 0,
    show: Annotated[
        int, typer.Option(min=0, help="So many documents, with the tokens that count in colour.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    offline: o.Offline = False,
) -> None:
    """Prepare text for training: documents, tokens, duplicates, what is held out.

    Prepared once, it is found again. Training does this by itself; here you see it before.

    [b]Examples[/b]

      unspool train data
      unspool train data books/ --vocab-size 8192
      unspool train data chats.jsonl --model default --show 1
    """
    from unspool.cli.table import print_columns, print_json
    from unspool.cli.tokenize import open_vocabulary
    from unspool.train.data.shards import prepare
    from unspool.train.data.sources import DEFAULT_SOURCE
    from unspool.train.data.tokenizer import TokenizerSettings, make_tokenizer

    names, apart = source or [DEFAULT_SOURCE], s.share_or_source(held_out)
    with s.reading_bar() as progress:
        if model is None and tokenizer is None:
            opened = make_tokenizer(
                names, TokenizerSettings(vocab_size), field=field, limit=limit, held_out=apart,
                seed=seed, progress=progress, offline=offline,
            ).tokenizer  # fmt: skip
        else:
            opened = open_vocabulary(model, tokenizer, offline)
        prepared = prepare(
            names, opened, field=field, limit=limit, held_out=apart, seed=seed,
            progress=progress, offline=offline,
        )  # fmt: skip
    if as_json:
        print_json({**prepared.card.to_json(), "folder": str(prepared.folder)})
        return
    print_columns([*prepared.card.rows(), ["folder", str(prepared.folder)]])
    for number in range(min(show, prepared.train.documents)):
        print()
        _show(prepared.train, number, opened)


def _show(packed: Packed, number: int, tokenizer: Tokenizer) -> None:
    """One document; tokens that count for the loss stand out."""
    from rich.text import Text

    from unspool.cli.show import out, piece_style
    from unspool.text.tokenizer.characters import readable_pieces

    begin, end = packed.borders[number : number + 2].tolist()
    end = min(end, begin + 2000)
    pieces = readable_pieces(
        [tokenizer.token_bytes(token) for token in packed.ids[begin:end].tolist()]
    )
    line = Text()
    for place, shown in enumerate(pieces, start=begin):
        counts = packed.counted is None or packed.counted[place]
        line.append(shown, piece_style(place) if counts else "dim")
    out().print(line)
