"""`unspool train`: a new model, or one of the commands around it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import typer

# Each lies in the file of its name.
COMMANDS = (
    "new", "tune", "dpo", "grpo", "twin", "merge", "task", "runs", "data", "tokenizer", "judge",
    "export", "scaling",
)  # fmt: skip

train = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train a model: from text to one that writes.\n\n"
    "[b]unspool train[/b] alone is short for [b]unspool train new[/b]: it fetches a small text "
    "(State of the Union addresses), and learns from it for about five minutes.",
    epilog="Examples:  unspool train   ·   unspool train notes.txt --minutes 10   ·   "
    "unspool train books/ --depth 8   ·   unspool train new --help   ·   unspool train runs",
)
for name in COMMANDS:
    train.command(name)(getattr(import_module(f"unspool.cli.train.{name}"), name))


def with_new(arguments: Sequence[str]) -> list[str]:
    """Put in the `new` that was left out."""
    if arguments and (arguments[0] in COMMANDS or arguments[0] in ("--help", "-h")):
        return list(arguments)
    return ["new", *arguments]
