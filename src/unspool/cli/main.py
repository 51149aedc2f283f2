"""Where every command starts: which one was meant, and how mistakes are told.

A mistake of the user's is one line on stderr and exit code 2. Ctrl-C is exit code 130, with what
was written so far left on the screen.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from unspool import __version__
from unspool.cli import hints
from unspool.cli.chat import chat
from unspool.cli.explore import explore
from unspool.cli.models import SHORTCUTS, models
from unspool.cli.page import page
from unspool.cli.replay import replay
from unspool.cli.run import run
from unspool.cli.score import score
from unspool.cli.serve import serve
from unspool.cli.tokenize import tokenize
from unspool.errors import UnspoolError

# Typer may carry its own copy of click: take the exceptions from what it shows.
UsageError: Any = typer.BadParameter.__base__
ClickException: Any = UsageError.__base__

app = typer.Typer(
    name="unspool",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(rich_help_panel="Write")(run)
app.command(rich_help_panel="Write")(chat)
app.command(rich_help_panel="Write")(replay)
app.command(rich_help_panel="Look")(explore)
app.command(rich_help_panel="Look")(tokenize)
app.command(rich_help_panel="Look")(score)
app.command(rich_help_panel="Serve")(page)
app.command(rich_help_panel="Serve")(serve)
app.add_typer(models, name="models", rich_help_panel="Models")
for shortcut, command in SHORTCUTS.items():
    app.command(shortcut, rich_help_panel="Models", hidden=shortcut == "ls")(command)

_COMMANDS = (
    "run", "chat", "replay", "explore", "tokenize", "score", "page", "serve", "models", *SHORTCUTS,
)  # fmt: skip
_OWN_OPTIONS = ("-h", "--help", "--version", "--install-completion", "--show-completion")


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"unspool {__version__}")
        raise typer.Exit


@app.callback(
    epilog='Examples:  unspool "Why do leaves change color in fall?"   ·   '
    'unspool "Once upon a time" --raw --probs   ·   cat notes.txt | unspool "Summarize:"\n\n'
    "Environment:  UNSPOOL_CACHE, UNSPOOL_DEFAULT_MODEL, UNSPOOL_API_KEY, UNSPOOL_ISA, HF_HOME, "
    "HF_TOKEN, NO_COLOR and others: see docs/command-line.md"
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
    if first in _COMMANDS or first in _OWN_OPTIONS or first.startswith("--show-completion"):
        return list(arguments)
    if first == "help":
        return with_command([*arguments[1:], "--help"], piped)
    if mistaken := hints.hint(first, _COMMANDS):
        raise UnspoolError(mistaken)
    return ["run", *arguments]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    piped = not sys.stdin.isatty() if sys.stdin else False
    sys.exit(_exit_code(given, piped))


def _exit_code(given: Sequence[str], piped: bool = False) -> int:
    try:
        arguments = with_command(given, piped)
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
    except BrokenPipeError:  # whoever read our output has gone: nothing left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


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
