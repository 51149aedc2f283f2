"""`unspool train`: a new model, or one of the commands around it."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from unspool.cli.train.data import data
from unspool.cli.train.dpo import dpo
from unspool.cli.train.export import export
from unspool.cli.train.grpo import grpo
from unspool.cli.train.judge import judge
from unspool.cli.train.merge import merge
from unspool.cli.train.new import new
from unspool.cli.train.runs import runs
from unspool.cli.train.scaling import scaling
from unspool.cli.train.task import task
from unspool.cli.train.tokenizer import tokenizer
from unspool.cli.train.tune import tune
from unspool.cli.train.twin import twin

_FUNCTIONS = (
    new, tune, dpo, grpo, twin, merge, task, runs, data, tokenizer, judge, export, scaling
)  # fmt: skip
COMMANDS = tuple(function.__name__ for function in _FUNCTIONS)

train = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train a language model from text, or fine-tune one.\n\n"
    "[b]unspool train[/b] alone is short for [b]unspool train new[/b]: it downloads a small text "
    "(State of the Union addresses) and trains on it for about five minutes.",
    epilog="Examples:  unspool train   ·   unspool train notes.txt --minutes 10   ·   "
    "unspool train books/ --depth 8   ·   unspool train new --help   ·   unspool train runs",
)
for _function in _FUNCTIONS:
    train.command(_function.__name__)(_function)


def with_new(arguments: Sequence[str]) -> list[str]:
    """Insert the default command `new` if the arguments do not name one."""
    if arguments and (arguments[0] in COMMANDS or arguments[0] in ("--help", "-h")):
        return list(arguments)
    return ["new", *arguments]
