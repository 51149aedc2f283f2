"""Lists on standard output: columns for people, JSON for programs; both can be piped."""

from __future__ import annotations

import sys
from typing import Any

_LEAST_ROOM = 30  # columns


def print_json(content: Any) -> None:
    import json

    print(json.dumps(content, indent=2, ensure_ascii=False))


def print_table(titles: str, rows: list[list[str]]) -> None:
    """Columns below their titles."""
    print_columns([titles.split(), *rows])


def print_columns(rows: list[list[str]]) -> None:
    """Columns as wide as what is in them; on a terminal the last one is wrapped, never cut."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    indent = sum(widths) + 2 * len(widths)
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        print("  ".join((*cells, _wrapped(row[-1], indent))).rstrip())


def _wrapped(text: str, indent: int) -> str:
    """Lines below each other from `indent` on; below the row where that leaves little room."""
    import shutil
    import textwrap

    columns = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or indent + len(text) <= columns:
        return text
    below = columns - indent < _LEAST_ROOM
    margin = " " * (4 if below else indent)
    room = columns - len(margin)
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return (
        "\n".join(["", *(margin + line for line in lines)]) if below else f"\n{margin}".join(lines)
    )
