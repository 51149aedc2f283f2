"""`unspool train`: the group of training commands."""

from __future__ import annotations

import typer

from unspool.cli.train.data import data, tokenizer
from unspool.cli.train.new import new
from unspool.cli.train.runs import export, judge, runs
from unspool.cli.train.sae import sae
from unspool.cli.train.scaling import scaling
from unspool.cli.train.tuning import dpo, grpo, merge, task, tune, twin

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
for _function in (
    new, tune, dpo, grpo, twin, merge, task, runs, data, tokenizer, judge, export, scaling,
    sae,
):  # fmt: skip
    train.command(_function.__name__)(_function)
