"""`unspool chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from unspool.cli import interrupt
from unspool.cli import options as o
from unspool.cli import output as out
from unspool.errors import SettingsError, UnspoolError, count

if TYPE_CHECKING:
    from unspool.cli.stored_chat import StoredChat
    from unspool.conversation import Conversation
    from unspool.engine.generation import Generation
    from unspool.lm import LanguageModel

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
    steer: o.Steer = None,
    quiet: o.Quiet = False,
    resume: Annotated[
        str | None,
        typer.Option(
            "--continue", help="Continue a stored conversation: the start of its id, or last."
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="Folder of stored texts. Default: UNSPOOL_STATE, or data folder."),
    ] = None,
    no_state: Annotated[
        bool, typer.Option("--no-state", help="Do not store the conversation.")
    ] = False,
    *,
    model_choice: o.ModelChoice,
    sampling: dict[str, Any],
) -> None:
    """Chat with a model. /help lists the commands; Ctrl-C stops an answer.

    [b]Examples[/b]

      unspool chat
      unspool chat --system "Answer in one sentence." --temperature 0.3
      unspool chat --continue last
    """
    from unspool.conversation import Conversation

    options: dict[str, Any] = {
        "max_tokens": max_tokens, "top": 0, "explain": False, "think_budget": think_budget,
        **sampling,
    }  # fmt: skip
    o.check(options)
    lm = o.with_adapter(model_choice.load(), adapter)
    options["steer"] = o.parse_steer(lm, steer)
    conversation = Conversation(lm, system, o.thinking(think, effort))
    store = _ChatStore(None if adapter else o.state_folder(state, no_state), lm)
    if resume is not None:
        store.resume(resume, conversation)
    seed = options.pop("seed", None)
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        import readline  # noqa: F401  (gives input() a history and cursor keys)

        out.say("/help lists the commands, Ctrl-D leaves")
    turn = len(conversation.exchanges)
    with store, interrupt.raise_on_signal():
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
                answer = {**options, **turn_seed}
                generation = _answer(conversation, question, answer, probs, quiet)
                store.save(conversation, generation)
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
) -> Generation:
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
    return generation


class _ChatStore:
    """Stores the conversation after every answer. Without a folder it does nothing."""

    def __init__(self, folder: Path | None, lm: LanguageModel) -> None:
        self._folder, self._lm = folder, lm
        self._chat: StoredChat | None = None

    def open(self) -> StoredChat | None:
        """Open the folder, the first time. Raises UnspoolError if it cannot be used."""
        if self._chat is None and self._folder is not None:
            from unspool.cli.stored_chat import StoredChat

            self._chat = StoredChat(self._folder, self._lm, allow_readonly=True)
            if self._chat.readonly_note is not None:
                out.say(self._chat.readonly_note)
        return self._chat

    def resume(self, name: str, conversation: Conversation) -> None:
        """Continue a stored conversation."""
        chat = self.open()
        if chat is None:
            raise SettingsError("--continue needs stored texts; leave out --no-state")
        title = chat.resume(None if name == "last" else name, conversation)
        turns = count(len(conversation.exchanges), "turn")
        out.say(f"continuing {title!r}: {turns}, {len(conversation.ids):,} tokens")

    def save(self, conversation: Conversation, generation: Generation) -> None:
        """Store the conversation; if that is impossible, say so once and continue without."""
        try:
            if (chat := self.open()) is not None:
                chat.save(conversation, generation)
        except UnspoolError as error:
            self._folder = None
            out.say(f"the conversation is not stored: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._chat is not None:
            self._chat.close()
