"""Lists on standard output: columns for people, JSON for programs; both can be piped."""

from __future__ import annotations

from typing import Any


def print_json(content: Any) -> None:
    import json

    print(json.dumps(content, indent=2, ensure_ascii=False))


def print_table(titles: str, rows: list[list[str]]) -> None:
    """Columns below their titles."""
    print_columns([titles.split(), *rows])


def print_columns(rows: list[list[str]]) -> None:
    """Columns as wide as what is in them; nothing is cut off."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
