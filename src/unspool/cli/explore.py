"""`unspool explore`: walk through a text token by token, and take another way where you like.

The screen is drawn by `explore_view.py`, keys are read one at a time. What the keys do is in
`Explorer`, which knows nothing of screens; every text that was left stays as a branch to come back
to.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli import interrupt
from unspool.cli import options as o
from unspool.errors import UnspoolError

if TYPE_CHECKING:
    from rich.console import Console

    from unspool.engine.generation import Generation
    from unspool.engine.steps import Candidate
    from unspool.language_model import LanguageModel

SHOWN = 10


@dataclass(slots=True)
class Explorer:
    """A text with a cursor, and the branches that were left on the way."""

    lm: LanguageModel
    branches: list[Generation]
    at: int = 0  # which branch
    cursor: int = 0  # behind how many of its tokens we stand
    chosen: int = 0  # which candidate is marked
    message: str = ""
    _candidates: dict[tuple[int, ...], tuple[Candidate, ...]] = field(default_factory=dict)

    @property
    def text(self) -> Generation:
        return self.branches[self.at]

    def candidates(self) -> tuple[Candidate, ...]:
        """The likeliest tokens where the cursor stands."""
        past = (*self.text.prompt, *self.text.tokens[: self.cursor])
        if past not in self._candidates:
            self._candidates[past] = self.lm.choices(past, SHOWN)
        return self._candidates[past]

    # -- what the keys do ----------------------------------------------------------------------

    def forward(self) -> None:
        """The next token: the one that was written, or a newly picked one."""
        if self.cursor == len(self.text.steps):
            self.branches[self.at] = self.text.resume(max_tokens=len(self.text.steps) + 1)
        self._move(min(self.cursor + 1, len(self.text.steps)))

    def back(self) -> None:
        self._move(max(0, self.cursor - 1))

    def mark(self, step: int) -> None:
        self.chosen = (self.chosen + step) % max(1, len(self.candidates()))

    def take(self) -> None:
        """Put the marked candidate here; what stood behind stays as a branch."""
        self._put(self.candidates()[self.chosen].token)

    def type(self, words: str) -> None:
        """Put words of one's own here."""
        if words:
            self._put(words)

    def run(self, tokens: int = 20) -> None:
        """Write on for a while."""
        self._leave()
        self.branches[self.at] = self.text.resume(max_tokens=self.cursor + tokens)
        self._move(len(self.text.steps))

    def fork(self) -> None:
        """A copy of this text up to the cursor, to go another way with."""
        self.branches.append(self.text.rewind(self.cursor))
        self.at = len(self.branches) - 1
        self.message = f"branch {self.at + 1} begins here"

    def next_branch(self) -> None:
        self.at = (self.at + 1) % len(self.branches)
        self._move(len(self.text.steps))

    def _put(self, token: int | str) -> None:
        self._leave()
        changed = self.text.choose(token)
        self.branches[self.at] = changed
        self._move(len(changed.steps))

    def _leave(self) -> None:
        """Go back to the cursor; a longer text is kept as another branch."""
        if self.cursor < len(self.text.steps):
            self.branches.append(self.text)
            self.branches[self.at] = self.text.rewind(self.cursor)
            self.message = f"the rest stays as branch {len(self.branches)}"

    def _move(self, cursor: int) -> None:
        self.cursor, self.chosen = cursor, 0


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
