"""`unspool chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from unspool.cli import interrupt
from unspool.cli import options as o
from unspool.errors import UnspoolError

if TYPE_CHECKING:
    from unspool.conversation import Conversation

HELP = """\
/undo          take the last question and answer back
/retry         answer the last question again, differently
/system TEXT   begin anew with this system message (nothing: without one)
/save FILE     write the conversation as JSON
/help          this
/quit          leave (or Ctrl-D)"""


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
    chosen: o.ModelChoice,
    sampling: dict[str, Any],
) -> None:
    """Talk with a model. /help lists what can be said to Unspool itself; Ctrl-C stops an answer.

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
    lm = o.with_adapter(chosen.load(), adapter)
    talk = Conversation(lm, system, o.thinking(think, effort))
    seed = options.pop("seed", None)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (gives input() a history and cursor keys)

        from unspool.cli.show import say

        say("/help lists the commands, Ctrl-D leaves")
    turn = 0
    with interrupt.raised():
        while (line := _ask(interactive)) is not None:
            if not line.strip():
                continue
            try:
                question = _command(talk, line) if line.startswith("/") else line
                if question is None:
                    continue
                if question is _LEAVE:
                    return
                again = {} if seed is None else {"seed": seed + turn}
                _answer(talk, question, {**options, **again}, probs, quiet)
                turn += 1
            except UnspoolError as error:  # a mistake ends the turn, not the conversation
                print(f"unspool: {' '.join(str(error).split())}", file=sys.stderr)
            except KeyboardInterrupt:  # and so does Ctrl-C, at whatever moment
                continue


_LEAVE = "/quit"


def _ask(interactive: bool) -> str | None:
    try:
        return input("› " if interactive else "")
    except EOFError:
        if interactive:
            print()
        return None
    except KeyboardInterrupt:
        if interactive:
            print()
        raise typer.Exit(interrupt.INTERRUPTED) from None
    except UnicodeDecodeError:
        raise UnspoolError("standard input is not UTF-8 text; convert it first") from None


def _command(talk: Conversation, line: str) -> str | None:
    """Do what a /command says; gives a question if one is to be answered."""
    from unspool.cli.show import say

    name, _, rest = line.strip().partition(" ")
    if name in ("/quit", "/exit", "/q"):
        return _LEAVE
    if name == "/undo":
        say(f"taken back: {talk.undo()}")
    elif name == "/retry":
        return talk.undo()
    elif name == "/system":
        talk.restart(rest.strip() or None)
        say("a new conversation")
    elif name == "/save":
        _save(talk, rest.strip())
    elif name == "/help":
        say(HELP)
    else:
        raise UnspoolError(f"there is no command {name}; /help lists them")
    return None


def _save(talk: Conversation, name: str) -> None:
    from unspool.cli.show import say

    if not name:
        raise UnspoolError("say where: /save conversation.json")
    content = {"messages": talk.messages, "ids": talk.ids}
    try:
        Path(name).expanduser().write_text(
            json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8"
        )
    except OSError as error:
        raise UnspoolError(f"{name} cannot be written: {error.strerror}") from error
    say(f"saved {len(talk.messages)} messages to {name}")


def _answer(
    talk: Conversation, question: str, options: dict[str, Any], probs: bool, quiet: bool
) -> None:
    from unspool.cli.run import show_colours, show_plain
    from unspool.cli.show import closing_line, say

    generation, steps = talk.ask(question, **options)
    interrupted = False
    try:
        (show_colours if probs else show_plain)(steps, generation)
    except KeyboardInterrupt:
        interrupted = True
        steps.close()  # type: ignore[attr-defined]
    if not quiet:
        stopped = "stopped; " if interrupted else ""
        say(f"{stopped}{closing_line(generation)}, {talk.reused} prompt tokens not read again")
