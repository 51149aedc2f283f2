"""Where every command starts: which one was meant, and how mistakes are told.

A mistake of the user's is one line on stderr and exit code 2. Ctrl-C is exit code 130, with what
was written so far left on the screen.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from unspool import __version__
from unspool.backends.torch.parallel import worker
from unspool.cli import hints
from unspool.errors import UnspoolError

# Typer may carry its own copy of click: take the exceptions from what it shows.
UsageError: Any = typer.BadParameter.__base__
ClickException: Any = UsageError.__base__

# Where the help shows a command. Each lies in the file of its name and is imported when it is
# meant, so that no command waits for the others.
_PANELS = {
    "run": "Write", "chat": "Write", "replay": "Write", "fill": "Write", "edit": "Write",
    "think": "Write", "batch": "Write",
    "explore": "Look", "tokenize": "Look", "score": "Look", "costs": "Look",
    "page": "Serve", "serve": "Serve",
}  # fmt: skip
SHORTCUTS = ("pull", "list", "ls", "rm", "show", "ps")  # for those of `models`
_COMMANDS = (*_PANELS, "train", "models", *SHORTCUTS)
_OWN_OPTIONS = ("-h", "--help", "--version", "--install-completion", "--show-completion")


def app_with(names: Iterable[str] = _COMMANDS) -> typer.Typer:
    """The program with these commands."""
    app = typer.Typer(
        name="unspool",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(epilog=_EPILOG)(top)
    for name in names:
        if name in _PANELS:
            command = getattr(import_module(f"unspool.cli.{name}"), name)
            app.command(rich_help_panel=_PANELS[name])(command)
            continue
        if name == "train":
            from unspool.cli.train.group import train

            app.add_typer(train, name=name, rich_help_panel="Train")
            continue
        from unspool.cli import models

        if name == "models":
            app.add_typer(models.models, name=name, rich_help_panel="Models")
        else:
            hidden = name == "ls"
            app.command(name, rich_help_panel="Models", hidden=hidden)(models.SHORTCUTS[name])
    return app


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"unspool {__version__}")
        raise typer.Exit


_EPILOG = (
    'Examples:  unspool "Why do leaves change color in fall?"   ·   '
    'unspool "Once upon a time" --raw --probs   ·   cat notes.txt | unspool "Summarize:"\n\n'
    "Environment:  UNSPOOL_CACHE, UNSPOOL_DEFAULT_MODEL, UNSPOOL_DEFAULT_DATA, UNSPOOL_RUNS, "
    "UNSPOOL_API_KEY, UNSPOOL_ISA, HF_HOME, HF_TOKEN, NO_COLOR and others: see docs/command-line.md"
)


def top(
    version: Annotated[
        bool,
        typer.Option("--version", help="Say the version.", callback=_say_version, is_eager=True),
    ] = False,
) -> None:
    """Text unspools from a language model one token at a time. See every step.

    [b]unspool "a prompt"[/b] is short for [b]unspool run "a prompt"[/b].
    """


def with_command(arguments: Sequence[str], piped: bool) -> list[str]:
    """Put in the `run` that was left out: `unspool "prompt"`, `unspool -t 0 "prompt"`."""
    if not arguments:
        return ["run"] if piped else ["--help"]
    first = arguments[0]
    if first in ("train", "models") and arguments[1:2] == ["help"]:
        return [first, *arguments[2:], "--help"]
    if first == "train":
        from unspool.cli.train.group import with_new

        return [first, *with_new(arguments[1:])]
    if first in _COMMANDS or first in _OWN_OPTIONS or first.startswith("--show-completion"):
        return list(arguments)
    if first == "help":
        return _help_arguments(arguments[1:])
    if mistaken := hints.hint(first, _COMMANDS, arguments[1:]):
        raise UnspoolError(mistaken)
    return ["run", *arguments]


def _help_arguments(words: Sequence[str]) -> list[str]:
    """The arguments that show the help of a command, given as `help COMMAND`."""
    if not words or words[0] in (*_COMMANDS, "--help", "-h"):
        return [*words, "--help"]
    raise UnspoolError(hints.unknown_command(words[0], _COMMANDS))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    piped = not sys.stdin.isatty() if sys.stdin else False
    code = _exit_code(given, piped)
    worker.release_workers()
    sys.exit(code)


def _exit_code(given: Sequence[str], piped: bool = False) -> int:
    try:
        arguments = with_command(given, piped)
        if arguments[0] != "train":  # where each process trains
            worker.run_worker_unless_rank_zero()
        alone = arguments[0] in _COMMANDS and "_UNSPOOL_COMPLETE" not in os.environ
        app = app_with(arguments[:1] if alone else _COMMANDS)
        result = app(args=arguments, prog_name="unspool", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except UnspoolError as error:
        return _say(str(error))
    except ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return 0  # the help has been shown already
        return _say(_usage(error))
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except MemoryError:
        return _say("there is not enough memory; use a smaller model, or one with fewer bits")
    except BrokenPipeError:  # the reader of our output left: there is nobody to write for
        _drop_output()
        return 0
    except SystemExit as leaving:
        if not isinstance(leaving.__context__, BrokenPipeError):  # which typer makes an exit of
            raise
        _drop_output()
        return 0
    except OSError as error:
        if error.errno not in _WRITE_ERRORS:
            raise
        _drop_output()
        place = error.filename or "standard output"
        _say(f"{place} cannot be written: {error.strerror}")
        return WRITE_FAILED


# What a write fails with when the disk is full, a quota is reached or a device is broken.
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
WRITE_FAILED = 74  # EX_IOERR


def _drop_output() -> None:
    """Send what is still buffered for standard output nowhere: flushing it would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(error: Any) -> str:
    """What click has to say, with where to read on."""
    message = str(error.format_message()).rstrip(".")
    context = error.ctx if isinstance(error, UsageError) else None
    command = context.command_path if context else "unspool"
    extra = re.search(r"extra argument\S* \((.*)\)", message)
    first = context.params.get("prompt", context.params.get("text")) if context else None
    if extra and first:
        message = hints.extra_words(first, extra[1])
    elif option := hints.OPTIONS.get(getattr(error, "option_name", "")):
        message = f"No such option: {error.option_name}; here it is {option}"
    return f"{message}; see {command} --help"


def _say(message: str) -> int:
    line = " ".join(message.split())
    print(f"unspool: {line}", file=sys.stderr)
    return 2
