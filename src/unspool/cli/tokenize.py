"""`unspool tokenize`: a text in the pieces that a model reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unspool.cli import options as o
from unspool.errors import count

if TYPE_CHECKING:
    from unspool.text.tokenizer.tokenizer import Tokenizer


def tokenize(
    text: Annotated[
        str | None, typer.Argument(help="The text to cut; - or nothing reads stdin.")
    ] = None,
    model: o.Model = None,
    vocabulary: Annotated[
        str | None,
        typer.Option(help="gpt2, cl100k, o200k, a .tiktoken or tokenizer.json file, or a folder."),
    ] = None,
    merges: Annotated[bool, typer.Option("--merges", help="Show the pieces joining.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Only the ids, on one line.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
    specials: Annotated[
        bool, typer.Option("--specials", help="Control tokens in the text are control.")
    ] = False,
    offline: o.Offline = False,
) -> None:
    """Cut a text into tokens: pieces in colour, ids, bytes.

    [b]Examples[/b]

      unspool tokenize "Why do leaves change color in fall?"
      unspool tokenize "unspooling" --merges
      unspool tokenize --ids < notes.txt
    """
    from unspool.cli.run import read_prompt
    from unspool.text.tokenizer.pieces import readable_pieces

    given = read_prompt(text)
    tokenizer = open_vocabulary(model, vocabulary, offline)
    found = tokenizer.encode(given, specials=specials)
    if ids:
        print(*found)
    elif as_json:
        pieces = list(map(tokenizer.token_bytes, found))
        rows = [
            {"id": token, "text": shown, "bytes": list(piece)}
            for token, piece, shown in zip(found, pieces, readable_pieces(pieces), strict=True)
        ]
        print(json.dumps(rows, ensure_ascii=False))
    elif merges:
        _show_merges(tokenizer, given)
    else:
        _show_pieces(tokenizer, given, found)


def open_vocabulary(model: str | None, vocabulary: str | None, offline: bool) -> Tokenizer:
    """The tokenizer of a model, or a vocabulary by its name or file."""
    from unspool.errors import ModelFileError, SettingsError
    from unspool.text.tokenizer.tokenizer import Tokenizer

    if vocabulary is not None:
        if model is not None:
            raise SettingsError("give --model or --vocabulary, not both")
        if vocabulary.endswith(".json") or Path(vocabulary).is_dir():
            return Tokenizer.from_file(vocabulary)
        return Tokenizer.from_tiktoken(vocabulary)
    from unspool.cli.model_info import find_checkpoint
    from unspool.loading import open_tokenizer

    checkpoint = find_checkpoint(model, offline)
    found = open_tokenizer(checkpoint)
    if found is None:
        raise ModelFileError(
            f"{checkpoint.path}: has no vocabulary; put its tokenizer.json beside the weights"
        )
    return found


def _show_pieces(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    from rich.table import Table
    from rich.text import Text

    from unspool.cli.show import out, piece_style, quoted
    from unspool.text.tokenizer.pieces import readable_pieces
    from unspool.text.tokenizer.stream import TextStream

    console = out()
    line, stream = Text(), TextStream()
    for number, token in enumerate(ids):  # a character of several tokens stands at its last one
        line.append(stream.push(tokenizer.token_bytes(token)), piece_style(number))
    line.append(stream.finish())
    console.print(line)
    table = Table("id", "piece", "bytes", box=None)
    pieces = list(map(tokenizer.token_bytes, ids))
    for number, shown in enumerate(readable_pieces(pieces)):
        told = Text(quoted(shown), piece_style(number))
        table.add_row(str(ids[number]), told, pieces[number].hex(" "))
    console.print(table)
    characters = max(1, len(ids))
    console.print(
        f"{count(len(ids), 'token')}, {count(len(text), 'character')}, "
        f"{count(len(text.encode()), 'byte')}: "
        f"{len(text) / characters:.2f} characters a token"
    )


def _show_merges(tokenizer: Tokenizer, text: str) -> None:
    from rich.text import Text

    from unspool.cli.show import out, piece_style, quoted
    from unspool.text.tokenizer.bpe import merge_steps
    from unspool.text.tokenizer.pieces import readable_pieces

    def drawn(pieces: tuple[bytes, ...]) -> Text:
        line = Text()
        for number, shown in enumerate(readable_pieces(pieces)):
            line.append(quoted(shown), piece_style(number))
            line.append(" ")
        return line

    console = out()
    for word in merge_steps(tokenizer, text):
        console.print(Text("          ").append_text(drawn(word.start)))
        for merge in word.merges:
            console.print(Text(f"{merge.rank:>8}  ", style="dim").append_text(drawn(merge.pieces)))
        console.print(Text("          → " + " ".join(map(str, word.ids)), style="bold"))
