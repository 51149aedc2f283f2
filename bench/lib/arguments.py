"""Command lines of the benchmarks."""

import argparse
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any


def make_parser(doc: str | None, examples: str = "") -> argparse.ArgumentParser:
    """Parser whose help is a module's docstring, with its line breaks."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, epilog=examples, formatter_class=form)


def add_options(parser: argparse.ArgumentParser, *options: tuple[Any, ...]) -> None:
    """Add options given as (name, default or type, help); `False` makes a flag."""
    for name, default, *text in options:
        settings: dict[str, Any] = {"help": text[0]} if text else {}
        if default is False:
            settings["action"] = "store_true"
        elif isinstance(default, type):
            settings["type"] = default
        else:
            settings |= {"type": type(default), "default": default}
        if settings.get("type") in (Path, type(Path())):
            settings |= {"type": Path, "metavar": "PATH"}
        parser.add_argument(name, **settings)


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """Argument type that accepts only these names."""

    def check(word: str) -> str:
        if word not in names:
            raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(names)}")
        return word

    return check


def list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Argument type of values separated by commas."""

    def split(text: str) -> list[Any]:
        try:
            return [kind(word) for word in text.split(",") if word]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 1,4,16") from None

    return split
