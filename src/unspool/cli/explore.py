"""`unspool explore`: walk through a text token by token, and take another way where you like.

The screen is drawn by rich, keys are read one at a time. What the keys do is in `Explorer`, which
knows nothing of screens; every text that was left stays as a branch to come back to.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli import options as o
from unspool.errors import UnspoolError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from unspool.engine.generation import Generation
    from unspool.engine.steps import Candidate
    from unspool.session import LanguageModel

SHOWN = 10
HELP = (
    "→ or space: next token   ←: back   ↑ ↓: choose a candidate   enter: take it   "
    "t: type your own words   r: run on   f: fork   tab: next branch   h: help   q: leave"
)


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


def view(explorer: Explorer, prompt: str) -> RenderableType:
    """What is on the screen."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    from unspool.cli.show import chance_style, in_cells

    text = Text(prompt, "dim")
    for number, step in enumerate(explorer.text.steps):
        style: Any = chance_style(math.exp(step.logprob))
        if number >= explorer.cursor:
            style = "dim"
        text.append(step.text if step.text or not step.bytes else "·", style)
        if number + 1 == explorer.cursor:
            text.append("▏", "bold")
    if explorer.cursor == 0:
        text.append("▏" if not explorer.text.steps else "", "bold")
    rows = Text()
    for number, candidate in enumerate(explorer.candidates()):
        chance = math.exp(candidate.logprob)
        marked = number == explorer.chosen
        rows.append("▸ " if marked else "  ", "bold")
        rows.append(f"{in_cells(candidate.text, 18)} ", "bold" if marked else "")
        rows.append("█" * round(chance * 30) or "▏", "green" if marked else "blue")
        rows.append(f" {chance:.1%}\n")
    branches = Text()
    for number, branch in enumerate(explorer.branches):
        here = number == explorer.at
        branches.append(f"{'▸' if here else ' '} {number + 1}  ", "bold" if here else "dim")
        branches.append(f"{len(branch.steps):>3} tokens  {branch.logprob:8.2f}  ", "dim")
        branches.append(branch.text[-60:].replace("\n", "⏎") + "\n")
    return Group(
        Panel(text, title=f"token {explorer.cursor} of {len(explorer.text.steps)}"),
        Panel(rows, title="what comes next"),
        Panel(branches, title="branches: tokens, log-probability, end"),
        Text(explorer.message or HELP, "dim"),
    )


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
_ESCAPES = {"[A": "up", "[B": "down", "[C": "right", "[D": "left"}
_NAMES = {"\r": "enter", "\n": "enter", "\t": "tab", "\x03": "q", "\x04": "q"}


def read_key() -> str:
    """One key press from the terminal."""
    import termios
    import tty

    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    try:
        tty.setcbreak(handle)
        key = sys.stdin.read(1)
        if key == "\x1b":
            key = _ESCAPES.get(sys.stdin.read(2), "")
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)
    return _NAMES.get(key, key) or "q"


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
    lm = chosen.load()
    ids: Any = prompt
    if chat or (chat is None and lm.is_instruct):
        ids = lm.chat_prompt(prompt).ids
    start, steps = lm.begin(ids, max_tokens=0, **sampling)
    list(start.extend(steps))
    explorer = Explorer(lm, [start])
    from rich.console import Console

    console = Console(highlight=False)
    shown = lm.tokenizer.decode(start.prompt)
    with console.screen() as screen:
        while True:
            screen.update(view(explorer, shown))
            explorer.message = ""
            key = read_key()
            if key == "q":
                break
            try:
                if key == "t":
                    console.show_cursor()
                    explorer.type(console.input("your words: "))
                elif key == "h":
                    explorer.message = HELP
                elif key in KEYS:
                    KEYS[key](explorer)
            except UnspoolError as error:
                explorer.message = str(error)
    print(explorer.text.text)
