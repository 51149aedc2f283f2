"""Entry point of all commands: find the command, run it, turn errors into exit codes.

A user error is one line on stderr and exit code 2. Ctrl-C is exit code 130; output that is already
written stays.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from unspool import __version__
from unspool.backends.torch.parallel import worker
from unspool.cli import hints
from unspool.errors import UnspoolError
from unspool.features import FEATURES, Command, load

# Typer may bundle its own copy of click: use the exception classes that Typer raises.
UsageError: Any = typer.BadParameter.__base__
ClickException: Any = UsageError.__base__

_OPTIONS = ("-h", "--help", "--version", "--install-completion", "--show-completion")
# A module is imported when its command runs. The order is that of --help.
_COMMANDS = {
    command.name: command
    for command in (
        Command("run", "unspool.cli.run:run", "Generate"),
        Command("chat", "unspool.cli.chat:chat", "Generate"),
        Command("replay", "unspool.cli.inspection:replay", "Generate"),
        Command("fill", "unspool.cli.revision:fill", "Generate"),
        Command("edit", "unspool.cli.revision:edit", "Generate"),
        Command("think", "unspool.cli.think:think", "Generate"),
        Command("explore", "unspool.cli.explore:explore", "Inspect"),
        Command("tokenize", "unspool.cli.inspection:tokenize", "Inspect"),
        Command("score", "unspool.cli.inspection:score", "Inspect"),
        Command("futures", "unspool.cli.inspection:futures", "Inspect"),
        Command("activations", "unspool.cli.activations:activations", "Inspect"),
        Command("patch", "unspool.cli.activations:patch", "Inspect"),
        Command("vector", "unspool.cli.activations:vector", "Inspect"),
        Command("features", "unspool.cli.activations:features", "Inspect"),
        Command("lens", "unspool.cli.activations:lens", "Inspect"),
        Command("attribute", "unspool.cli.activations:attribute", "Inspect"),
        Command(
            "sessions",
            "unspool.cli.sessions:sessions",
            "Inspect",
            subcommands=("list", "show", "export", "import", "delete"),
            default="list",
        ),
        Command("page", "unspool.cli.serve:page", "Serve"),
        Command("serve", "unspool.cli.serve:serve", "Serve"),
        Command("mcp", "unspool.cli.mcp:mcp", "Serve"),
        *(command for feature in FEATURES for command in feature.commands),
        Command(
            "models",
            "unspool.cli.models:models",
            "Models",
            subcommands=("list", "catalogue", "pull", "rm", "show", "info", "plan"),
        ),
        # Short forms without `models`, as in other programs.
        Command("pull", "unspool.cli.models:pull", "Models"),
        Command("list", "unspool.cli.models:list_models", "Models"),
        Command("ls", "unspool.cli.models:list_models", "Models", is_hidden=True),
        Command("rm", "unspool.cli.models:rm", "Models"),
        Command("show", "unspool.cli.models:info", "Models"),
        Command("ps", "unspool.cli.models:ps", "Models"),
        Command("doctor", "unspool.cli.doctor:doctor", "Setup"),
    )
}

_EPILOG = (
    'Examples:  unspool "Why do leaves change color in fall?"   ·   '
    'unspool "Once upon a time" --raw --probs   ·   cat notes.txt | unspool "Summarize:"\n\n'
    "Environment:  UNSPOOL_CACHE, UNSPOOL_DEFAULT_MODEL, UNSPOOL_DEFAULT_DATA, UNSPOOL_RUNS, "
    "UNSPOOL_STATE, UNSPOOL_API_KEY, UNSPOOL_ISA, HF_HOME, HF_TOKEN, NO_COLOR and others: see "
    "docs/reference/command-line.md"
)


def app_with(names: Iterable[str] = tuple(_COMMANDS)) -> typer.Typer:
    """Build the Typer app with these commands."""
    app = typer.Typer(
        name="unspool",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(epilog=_EPILOG)(top)
    for command in (_COMMANDS[name] for name in names):
        function, panel = load(command.target), command.panel
        if command.subcommands:
            app.add_typer(function, name=command.name, rich_help_panel=panel)
        else:
            hidden = command.is_hidden
            app.command(command.name, rich_help_panel=panel, hidden=hidden)(function)
    return app


def _print_version(is_set: bool) -> None:
    if is_set:
        print(f"unspool {__version__}")
        raise typer.Exit


def top(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Text unspools from a language model one token at a time. See every step.

    [b]unspool "a prompt"[/b] is short for [b]unspool run "a prompt"[/b].
    """


def with_command(arguments: Sequence[str], piped: bool) -> list[str]:
    """Insert the command if it was left out: `unspool "prompt"`, `unspool -t 0 "prompt"`."""
    if not arguments:
        return ["run"] if piped else ["--help"]
    first, *others = arguments
    if first == "help":
        return _help_arguments(others)
    if first in _COMMANDS:
        command = _COMMANDS[first]
        if command.subcommands and others[:1] == ["help"]:
            return [first, *others[1:], "--help"]
        if command.default and (
            not others or others[0] not in (*command.subcommands, "--help", "-h")
        ):
            return [first, command.default, *others]
        return list(arguments)
    if first in _OPTIONS or first.startswith("--show-completion"):
        return list(arguments)
    if message := hints.command_hint(first, _COMMANDS, others):
        raise UnspoolError(message)
    return ["run", *arguments]


def _help_arguments(words: Sequence[str]) -> list[str]:
    """Arguments that show the help of a command, for `help COMMAND`."""
    if not words or words[0] in (*_COMMANDS, "--help", "-h"):
        return [*words, "--help"]
    raise UnspoolError(hints.unknown_command(words[0], _COMMANDS))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    piped = not sys.stdin.isatty() if sys.stdin else False
    code = _exit_code(words, piped)
    worker.release_workers()
    sys.exit(code)


def _exit_code(words: Sequence[str], piped: bool = False) -> int:
    """Run a command and return its exit code."""
    try:
        arguments = with_command(words, piped)
        command = _COMMANDS.get(arguments[0])
        if command is None or not command.on_all_ranks:
            worker.run_worker_unless_rank_zero()
        is_alone = command is not None and "_UNSPOOL_COMPLETE" not in os.environ
        app = app_with(arguments[:1] if is_alone else _COMMANDS)
        result = app(args=arguments, prog_name="unspool", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except UnspoolError as error:
        return _print_error(str(error))
    except ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return 0  # the help is already printed
        return _print_error(_usage_message(error))
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except MemoryError:
        return _print_error("out of memory; use a smaller model, or one with fewer bits per weight")
    except BrokenPipeError:  # the reader of the output has closed the pipe
        _discard_output()
        return 0
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):  # Typer turns it into SystemExit
            raise
        _discard_output()
        return 0
    except OSError as error:
        if error.errno not in _WRITE_ERRORS:
            raise
        _discard_output()
        place = error.filename or "standard output"
        _print_error(f"{place} cannot be written: {error.strerror}")
        return WRITE_FAILED


# Errors of a write to a full disk, over a quota, or to a broken device.
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
WRITE_FAILED = 74  # EX_IOERR


def _discard_output() -> None:
    """Send buffered output to /dev/null: flushing it would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage_message(error: Any) -> str:
    """The message of a click error, with a hint where to read on."""
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


def _print_error(message: str) -> int:
    line = " ".join(message.split())
    print(f"unspool: {line}", file=sys.stderr)
    return 2
