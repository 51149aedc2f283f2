"""`unspool explore`: walk through a text token by token, and take another way where you like.

The screen is drawn by `explore_view.py`, keys are read one at a time. What they do is in
`explorer.py`; every text that was left stays as a branch to come back to.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli import interrupt
from unspool.cli import options as o
from unspool.cli.explorer import Explorer
from unspool.errors import UnspoolError

if TYPE_CHECKING:
    from rich.console import Console


KEYS: dict[str, Callable[[Explorer], None]] = {
    "right": Explorer.forward,
    " ": Explorer.forward,
    "left": Explorer.back,
    "up": lambda explorer: explorer.mark(-1),
    "down": lambda explorer: explorer.mark(1),
    "enter": Explorer.take,
    "r": Explorer.run,
    "f": Explorer.fork,
    "tab": Explorer.next_branch,
}
_ESCAPES = {"[A": "up", "[B": "down", "[C": "right", "[D": "left",
            "OA": "up", "OB": "down", "OC": "right", "OD": "left"}  # fmt: skip
_NAMES = {"\r": "enter", "\n": "enter", "\t": "tab", "\x04": "q", "": "q"}  # nothing: it is closed
_ESCAPE_SECONDS = 0.05


class Keyboard:
    """Keys one at a time, as they are pressed; the terminal is as it was once this is left."""

    def __enter__(self) -> Keyboard:
        import termios
        import tty

        self._handle = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._handle)
        tty.setcbreak(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        import termios

        termios.tcsetattr(self._handle, termios.TCSADRAIN, self._before)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Lines in here, with the keys that edit them."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def read(self) -> str:
        """The name of the next key; nothing for one that has none."""
        key = os.read(self._handle, 1).decode("latin-1")
        if key == "\x1b":  # an arrow sends three characters, the escape key this one alone
            more = select.select([self._handle], [], [], _ESCAPE_SECONDS)[0]
            return _ESCAPES.get(os.read(self._handle, 2).decode("latin-1"), "") if more else ""
        return _NAMES.get(key, key)


@o.sampling_options
@o.model_options
def explore(
    prompt: Annotated[str, typer.Argument(help="The text to start from.")],
    chat: o.Chat = None,
    *,
    chosen: o.ModelChoice,
    sampling: dict[str, Any],
) -> None:
    """Step through a text, see the candidates, pick another, go back, fork.

    [b]Examples[/b]

      unspool explore "Once upon a time" --raw
      unspool explore "Why do leaves change color in fall?" --seed 7
    """
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise UnspoolError("explore needs a terminal; for files and pipes there is --json")
    o.check(sampling)
    lm = chosen.load()
    ids: Any = prompt
    if chat or (chat is None and lm.is_instruct):
        ids = lm.chat_prompt(prompt).ids
    start, steps = lm.begin(ids, max_tokens=0, **sampling)
    list(start.extend(steps))
    explorer = Explorer(lm, [start])
    from rich.console import Console

    from unspool.cli.explore_view import view

    console = Console(highlight=False)
    shown = lm.tokenizer.decode(start.prompt)
    with interrupt.raised(), Keyboard() as keyboard, console.screen() as screen:
        while True:
            screen.update(view(explorer, shown, *console.size))
            explorer.message = ""
            key = keyboard.read()
            if key == "q":
                break
            try:
                if key == "t":
                    with keyboard.released():
                        explorer.type(_words(console))
                elif key in KEYS:
                    KEYS[key](explorer)
            except UnspoolError as error:
                explorer.message = str(error)
    print(explorer.text.text)


def _words(console: Console) -> str:
    console.show_cursor()
    try:
        return console.input("your words: ")
    except EOFError:  # Ctrl-D: none after all
        return ""
    finally:
        console.show_cursor(False)
