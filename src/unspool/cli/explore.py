"""`unspool explore`: step through a text token by token, and continue it differently anywhere.

`Explorer` is the state and what the keys do, `draw_screen` the screen, `Keyboard` the input.
"""

from __future__ import annotations

import math
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
from unspool.cli.output import pad_cells, probability_style
from unspool.errors import UnspoolError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from unspool.engine.generation import Generation
    from unspool.engine.results import Candidate
    from unspool.lm import LanguageModel

_NUM_CANDIDATES = 10


@dataclass(slots=True)
class Explorer:
    """A text with a cursor, and the other branches."""

    lm: LanguageModel
    branches: list[Generation]
    branch_index: int = 0
    cursor: int = 0  # number of tokens before it
    marked: int = 0  # index of the marked candidate
    message: str = ""
    _candidates: dict[tuple[int, ...], tuple[Candidate, ...]] = field(default_factory=dict)

    @property
    def text(self) -> Generation:
        return self.branches[self.branch_index]

    def candidates(self) -> tuple[Candidate, ...]:
        """The most likely tokens at the cursor."""
        past = (*self.text.prompt, *self.text.tokens[: self.cursor])
        if past not in self._candidates:
            self._candidates[past] = self.lm.choices(past, _NUM_CANDIDATES)
        return self._candidates[past]

    def forward(self) -> None:
        """Move to the next token; at the end, sample one."""
        if self.cursor == len(self.text.steps):
            self.branches[self.branch_index] = self.text.resume(max_tokens=1)
        self._move(min(self.cursor + 1, len(self.text.steps)))

    def back(self) -> None:
        self._move(max(0, self.cursor - 1))

    def mark(self, offset: int) -> None:
        self.marked = (self.marked + offset) % max(1, len(self.candidates()))

    def insert_marked(self) -> None:
        """Continue with the marked candidate; the old continuation stays as a branch."""
        self._insert(self.candidates()[self.marked].token)

    def type(self, words: str) -> None:
        """Continue with these words."""
        if words:
            self._insert(words)

    def run(self, tokens: int = 20) -> None:
        """Generate up to `tokens` tokens from the cursor."""
        self._rewind()
        self.branches[self.branch_index] = self.text.resume(max_tokens=tokens)
        self._move(len(self.text.steps))

    def fork(self) -> None:
        """Add a branch with the text up to the cursor, and switch to it."""
        self.branches.append(self.text.rewind(self.cursor))
        self.branch_index = len(self.branches) - 1
        self.message = f"branch {self.branch_index + 1} begins here"

    def next_branch(self) -> None:
        self.branch_index = (self.branch_index + 1) % len(self.branches)
        self._move(len(self.text.steps))

    def _insert(self, token: int | str) -> None:
        self._rewind()
        changed = self.text.choose(token)
        self.branches[self.branch_index] = changed
        self._move(len(changed.steps))

    def _rewind(self) -> None:
        """Rewind to the cursor; keep a longer text as another branch."""
        if self.cursor < len(self.text.steps):
            self.branches.append(self.text)
            self.branches[self.branch_index] = self.text.rewind(self.cursor)
            self.message = f"the old text is branch {len(self.branches)}"

    def _move(self, cursor: int) -> None:
        self.cursor, self.marked = cursor, 0


# -- keys ------------------------------------------------------------------------------------------

KEYS: dict[str, Callable[[Explorer], None]] = {
    "right": Explorer.forward,
    " ": Explorer.forward,
    "left": Explorer.back,
    "up": lambda explorer: explorer.mark(-1),
    "down": lambda explorer: explorer.mark(1),
    "enter": Explorer.insert_marked,
    "r": Explorer.run,
    "f": Explorer.fork,
    "tab": Explorer.next_branch,
}
_ESCAPES = {"[A": "up", "[B": "down", "[C": "right", "[D": "left",
            "OA": "up", "OB": "down", "OC": "right", "OD": "left"}  # fmt: skip
_NAMES = {"\r": "enter", "\n": "enter", "\t": "tab", "\x04": "q", "": "q"}  # "": closed
_ESCAPE_S = 0.05


class Keyboard:
    """Single key presses; restores the terminal mode on exit."""

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
    def line_mode(self) -> Iterator[None]:
        """Normal line input inside this context."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def read(self) -> str:
        """Name of the next key; "" for an unknown one."""
        key = os.read(self._handle, 1).decode("latin-1")
        if key == "\x1b":  # an arrow key sends three characters, the escape key only this one
            is_arrow = bool(select.select([self._handle], [], [], _ESCAPE_S)[0])
            return _ESCAPES.get(os.read(self._handle, 2).decode("latin-1"), "") if is_arrow else ""
        return _NAMES.get(key, key)


@o.sampling_options
@o.model_options
def explore(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    chat: o.Chat = None,
    *,
    model_choice: o.ModelChoice,
    sampling: dict[str, Any],
) -> None:
    """Step through a text: see the candidates, choose another token, rewind, fork.

    [b]Examples[/b]

      unspool explore "Once upon a time" --raw
      unspool explore "Why do leaves change color in fall?" --seed 7
    """
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise UnspoolError("explore needs a terminal; for files and pipes use unspool run --json")
    o.check(sampling)
    lm = model_choice.load()
    ids: Any = prompt
    if chat or (chat is None and lm.is_instruct):
        ids = lm.chat_prompt(prompt).ids
    start, steps = lm.begin(ids, max_tokens=0, **sampling)
    list(start.extend(steps))
    explorer = Explorer(lm, [start])
    from rich.console import Console

    console = Console(highlight=False)
    prompt_text = lm.tokenizer.decode(start.prompt)
    with interrupt.raise_on_signal(), Keyboard() as keyboard, console.screen() as screen:
        while True:
            screen.update(draw_screen(explorer, prompt_text, *console.size))
            explorer.message = ""
            key = keyboard.read()
            if key == "q":
                break
            try:
                if key == "t":
                    with keyboard.line_mode():
                        explorer.type(_read_words(console))
                elif key in KEYS:
                    KEYS[key](explorer)
            except UnspoolError as error:
                explorer.message = str(error)
    print(explorer.text.text)


def _read_words(console: Console) -> str:
    console.show_cursor()
    try:
        return console.input("your words: ")
    except EOFError:  # Ctrl-D cancels
        return ""
    finally:
        console.show_cursor(False)


# -- the screen ------------------------------------------------------------------------------------

# Text, candidates and branches are cut to the lines around the cursor, so that the keys are always
# visible in the last lines.
_KEY_LABELS = (
    "→ next", "← back", "↑ ↓ mark", "enter choose", "t type", "r run", "f fork", "tab branch",
    "q quit",
)  # fmt: skip
_SHORT_KEY_LABELS = ("→", "←", "↑", "↓", "enter", "t", "r", "f", "tab", "q")
_CURSOR = "▏"
_LOW_SCREEN = 14  # lines; below this, panels have no frames and keys no descriptions
_MIN_LINES = 3  # of text and of candidates, if they fit


def draw_screen(explorer: Explorer, prompt: str, width: int, height: int) -> RenderableType:
    """The screen for a terminal of `width` columns and `height` lines."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    is_low = height < _LOW_SCREEN
    frame, inner = (0, width) if is_low else (2, width - 4)
    keys = _key_lines(_SHORT_KEY_LABELS if is_low else _KEY_LABELS, width)
    room = height - len(keys) - bool(explorer.message)
    branches, candidates = _branch_rows(explorer, inner), _candidate_rows(explorer, inner)
    # Text and candidates have priority; branches get the remaining lines, if any.
    num_branches = max(0, min(len(branches), room - 3 * frame - 2 * _MIN_LINES))
    if num_branches:
        room -= num_branches + frame
    num_candidates = max(1, min(len(candidates), room - 2 * frame - _MIN_LINES))
    num_lines = max(1, room - num_candidates - 2 * frame)
    parts = {
        f"token {explorer.cursor} of {len(explorer.text.steps)}": _text_lines(
            explorer, prompt, inner, num_lines
        ),
        "next token": _rows_around(candidates, explorer.marked, num_candidates),
    }
    if num_branches:
        parts["branches: tokens, log-probability, end"] = _rows_around(
            branches, explorer.branch_index, num_branches
        )
    panels = [part if is_low else Panel(part, title=title) for title, part in parts.items()]
    message = [_cut(Text(explorer.message, "bold"), width)] if explorer.message else []
    return Group(*panels, *message, *keys)


def _key_lines(labels: tuple[str, ...], width: int) -> list[Text]:
    """The keys, on as few lines as possible."""
    from rich.text import Text

    lines = [""]
    for label in labels:
        joined = f"{lines[-1]} · {label}" if lines[-1] else label
        if len(joined) > width and lines[-1]:
            lines.append(label)
        else:
            lines[-1] = joined
    return [_cut(Text(line, "dim"), width) for line in lines]


def _cut(line: Text, width: int) -> Text:
    line.truncate(max(1, width), overflow="ellipsis")
    return line


def _text_lines(explorer: Explorer, prompt: str, width: int, num_lines: int) -> Text:
    """The lines of the text around the cursor."""
    from rich.console import Console
    from rich.text import Text

    text = Text(prompt, "dim")
    cursor_pos = len(prompt)
    for number, step in enumerate(explorer.text.steps):
        style: Any = probability_style(math.exp(step.logprob))
        piece = step.text if step.text or not step.bytes else "·"
        text.append(piece, style if number < explorer.cursor else "dim")
        if number + 1 == explorer.cursor:
            cursor_pos = len(text)
    text = text[:cursor_pos].append(_CURSOR, "bold").append_text(text[cursor_pos:])
    wrapped = text.wrap(Console(width=max(1, width)), max(1, width))
    cursor_line = next(number for number, line in enumerate(wrapped) if _CURSOR in line.plain)
    first = max(0, min(cursor_line - num_lines * 2 // 3, len(wrapped) - num_lines))
    return Text("\n").join(wrapped[first : first + num_lines])


def _rows_around(rows: list[Text], index: int, count: int) -> Text:
    """`count` of the rows, the one at `index` among them."""
    from rich.text import Text

    first = max(0, min(index - count // 2, len(rows) - count))
    return Text("\n").join(rows[first : first + count])


def _candidate_rows(explorer: Explorer, width: int) -> list[Text]:
    from rich.text import Text

    rows = []
    for number, candidate in enumerate(explorer.candidates()):
        probability = math.exp(candidate.logprob)
        is_marked = number == explorer.marked
        row = Text("▸ " if is_marked else "  ", "bold")
        row.append(f"{pad_cells(candidate.text, 18)} ", "bold" if is_marked else "")
        row.append("█" * round(probability * 30) or "▏", "green" if is_marked else "blue")
        rows.append(_cut(row.append(f" {probability:.1%}"), width))
    return rows


def _branch_rows(explorer: Explorer, width: int) -> list[Text]:
    from rich.text import Text

    rows = []
    for number, branch in enumerate(explorer.branches):
        is_current = number == explorer.branch_index
        row = Text(f"{'▸' if is_current else ' '} {number + 1}  ", "bold" if is_current else "dim")
        row.append(f"{len(branch.steps):>3} tokens  {branch.logprob:8.2f}  ", "dim")
        tail = max(0, width - len(row))
        rows.append(row.append(branch.text.replace("\n", "⏎")[-tail:] if tail else ""))
    return rows
