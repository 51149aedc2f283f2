"""`unspool train data`: prepare text for training, and show its statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from unspool.cli import options as o
from unspool.cli.train import source as s

if TYPE_CHECKING:
    from unspool.text.tokenizer.tokenizer import Tokenizer
    from unspool.train.data.prepared import PackedDocuments

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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    offline: o.Offline = False,
) -> None:
    """Prepare text for training: tokenize it, drop duplicates, hold out documents.

    The result is cached. Training does this by itself; this command shows the statistics before.

    [b]Examples[/b]

      unspool train data
      unspool train data books/ --vocab-size 8192
      unspool train data chats.jsonl --model default --show 1
    """
    from unspool.cli.table import print_columns, print_json
    from unspool.cli.tokenize import open_vocabulary
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

    from unspool.cli.show import out, piece_style
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
    out().print(line)
