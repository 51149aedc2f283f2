"""`unspool chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from unspool.cli import interrupt
from unspool.cli import options as o
from unspool.cli import output as out
from unspool.errors import UnspoolError

if TYPE_CHECKING:
    from unspool.conversation import Conversation

HELP = """\
/undo          remove the last question and answer
/retry         answer the last question again
/system TEXT   start a new conversation with this system message (or without one)
/save FILE     save the conversation as JSON
/help          show this list
/quit          leave (or Ctrl-D)"""
_QUIT = "/quit"


@o.sampling_options
@o.model_options
def chat(
    system: o.System = None,
    max_tokens: o.MaxTokens = 512,
    probs: o.Probs = False,
    think: o.Think = None,
    effort: o.Effort = None,
    think_budget: o.ThinkBudget = None,
    adapter: o.Adapter = None,
    quiet: o.Quiet = False,
    *,
    model_choice: o.ModelChoice,
    sampling: dict[str, Any],
) -> None:
    """Chat with a model. /help lists the commands; Ctrl-C stops an answer.

    [b]Examples[/b]

      unspool chat
      unspool chat --system "Answer in one sentence." --temperature 0.3
    """
    from unspool.conversation import Conversation

    options: dict[str, Any] = {
        "max_tokens": max_tokens, "top": 0, "explain": False, "think_budget": think_budget,
        **sampling,
    }  # fmt: skip
    o.check(options)
    lm = o.with_adapter(model_choice.load(), adapter)
    conversation = Conversation(lm, system, o.thinking(think, effort))
    seed = options.pop("seed", None)
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        import readline  # noqa: F401  (gives input() a history and cursor keys)

        out.say("/help lists the commands, Ctrl-D leaves")
    turn = 0
    with interrupt.raise_on_signal():
        while (line := _read_line(is_interactive)) is not None:
            if not line.strip():
                continue
            try:
                question = _run_command(conversation, line) if line.startswith("/") else line
                if question is None:
                    continue
                if question is _QUIT:
                    return
                turn_seed = {} if seed is None else {"seed": seed + turn}
                _answer(conversation, question, {**options, **turn_seed}, probs, quiet)
                turn += 1
            except UnspoolError as error:  # ends the turn, not the conversation
                print(f"unspool: {' '.join(str(error).split())}", file=sys.stderr)
            except KeyboardInterrupt:  # too
                continue


def _read_line(is_interactive: bool) -> str | None:
    try:
        return input("› " if is_interactive else "")
    except EOFError:
        if is_interactive:
            print()
        return None
    except KeyboardInterrupt:
        if is_interactive:
            print()
        raise typer.Exit(interrupt.INTERRUPTED) from None
    except UnicodeDecodeError:
        raise UnspoolError("standard input is not UTF-8 text; convert it first") from None


def _run_command(conversation: Conversation, line: str) -> str | None:
    """Run a /command; return a question if one is to be answered."""
    name, _, argument = line.strip().partition(" ")
    if name in ("/quit", "/exit", "/q"):
        return _QUIT
    if name == "/undo":
        out.say(f"removed: {conversation.undo()}")
    elif name == "/retry":
        return conversation.undo()
    elif name == "/system":
        conversation.restart(argument.strip() or None)
        out.say("new conversation")
    elif name == "/save":
        _save(conversation, argument.strip())
    elif name == "/help":
        out.say(HELP)
    else:
        raise UnspoolError(f"there is no command {name}; /help lists them")
    return None


def _save(conversation: Conversation, name: str) -> None:
    if not name:
        raise UnspoolError("/save needs a file name: /save conversation.json")
    content = {"messages": conversation.messages, "ids": conversation.ids}
    try:
        Path(name).expanduser().write_text(
            json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8"
        )
    except OSError as error:
        raise UnspoolError(f"{name} cannot be written: {error.strerror}") from error
    out.say(f"saved {len(conversation.messages)} messages to {name}")


def _answer(
    conversation: Conversation, question: str, options: dict[str, Any], probs: bool, quiet: bool
) -> None:
    generation, steps = conversation.ask(question, **options)
    prefix = ""
    try:
        (out.print_colours if probs else out.print_plain)(steps, generation)
    except KeyboardInterrupt:
        prefix = "stopped; "
        steps.close()  # type: ignore[attr-defined]
    if not quiet:
        cached = f"{conversation.reused} prompt tokens from the cache"
        out.say(f"{prefix}{out.closing_line(generation)}, {cached}")
