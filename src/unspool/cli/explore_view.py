"""The screen of `unspool explore`: text, candidates, branches, and always the keys.

Whatever is too long for the terminal is cut to the part around the cursor, so that the keys stay
where they are: in the last lines.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from unspool.cli.show import chance_style, in_cells

if TYPE_CHECKING:
    from unspool.cli.explore import Explorer

KEYS = (
    "→ next", "← back", "↑ ↓ mark", "enter take", "t type", "r run on", "f fork", "tab branch",
    "q leave",
)  # fmt: skip
_FEW_KEYS = ("→", "←", "↑", "↓", "enter", "t", "r", "f", "tab", "q")
_CURSOR = "▏"
_LOW = 14  # lines; on fewer, panels have no frames and keys no words
_LEAST = 3  # lines of text, and candidates, as long as there is any room


def view(explorer: Explorer, prompt: str, width: int, height: int) -> RenderableType:
    """What is on the screen of so many columns and lines."""
    low = height < _LOW
    frame, inner = (0, width) if low else (2, width - 4)
    keys = _keys(_FEW_KEYS if low else KEYS, width)
    room = height - len(keys) - bool(explorer.message)
    branches, candidates = _branches(explorer, inner), _candidates(explorer, inner)
    # Text and candidates come first; branches have what is left, and none where nothing is.
    shown = max(0, min(len(branches), room - 3 * frame - 2 * _LEAST))
    if shown:
        room -= shown + frame
    rows = max(1, min(len(candidates), room - 2 * frame - _LEAST))
    lines = max(1, room - rows - 2 * frame)
    parts = {
        f"token {explorer.cursor} of {len(explorer.text.steps)}": _around_cursor(
            explorer, prompt, inner, lines
        ),
        "what comes next": _around(candidates, explorer.chosen, rows),
    }
    if shown:
        parts["branches: tokens, log-probability, end"] = _around(branches, explorer.at, shown)
    framed = [part if low else Panel(part, title=title) for title, part in parts.items()]
    said = [_cut(Text(explorer.message, "bold"), width)] if explorer.message else []
    return Group(*framed, *said, *keys)


def _keys(names: tuple[str, ...], width: int) -> list[Text]:
    """The keys, on as few lines as they fit."""
    lines = [""]
    for key in names:
        joined = f"{lines[-1]} · {key}" if lines[-1] else key
        if len(joined) > width and lines[-1]:
            lines.append(key)
        else:
            lines[-1] = joined
    return [_cut(Text(line, "dim"), width) for line in lines]


def _cut(line: Text, width: int) -> Text:
    line.truncate(max(1, width), overflow="ellipsis")
    return line


def _around_cursor(explorer: Explorer, prompt: str, width: int, lines: int) -> Text:
    """As many lines of the text as there is room for; those about the cursor."""
    text = Text(prompt, "dim")
    at = len(prompt)
    for number, step in enumerate(explorer.text.steps):
        style: Any = chance_style(math.exp(step.logprob))
        shown = step.text if step.text or not step.bytes else "·"
        text.append(shown, style if number < explorer.cursor else "dim")
        if number + 1 == explorer.cursor:
            at = len(text)
    text = text[:at].append(_CURSOR, "bold").append_text(text[at:])
    wrapped = text.wrap(Console(width=max(1, width)), max(1, width))
    here = next(number for number, line in enumerate(wrapped) if _CURSOR in line.plain)
    first = max(0, min(here - lines * 2 // 3, len(wrapped) - lines))
    return Text("\n").join(wrapped[first : first + lines])


def _around(rows: list[Text], at: int, count: int) -> Text:
    """So many of the rows, the one that is marked among them."""
    first = max(0, min(at - count // 2, len(rows) - count))
    return Text("\n").join(rows[first : first + count])


def _candidates(explorer: Explorer, width: int) -> list[Text]:
    rows = []
    for number, candidate in enumerate(explorer.candidates()):
        chance = math.exp(candidate.logprob)
        marked = number == explorer.chosen
        row = Text("▸ " if marked else "  ", "bold")
        row.append(f"{in_cells(candidate.text, 18)} ", "bold" if marked else "")
        row.append("█" * round(chance * 30) or "▏", "green" if marked else "blue")
        rows.append(_cut(row.append(f" {chance:.1%}"), width))
    return rows


def _branches(explorer: Explorer, width: int) -> list[Text]:
    rows = []
    for number, branch in enumerate(explorer.branches):
        here = number == explorer.at
        row = Text(f"{'▸' if here else ' '} {number + 1}  ", "bold" if here else "dim")
        row.append(f"{len(branch.steps):>3} tokens  {branch.logprob:8.2f}  ", "dim")
        tail = max(0, width - len(row))
        rows.append(row.append(branch.text.replace("\n", "⏎")[-tail:] if tail else ""))
    return rows
