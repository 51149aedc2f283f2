"""Lists on standard output: columns for people, JSON for programs; both can be piped."""

from __future__ import annotations

from typing import Any


def print_json(content: Any) -> None:
    import json

    print(json.dumps(content, indent=2, ensure_ascii=False))


def print_table(titles: str, rows: list[list[str]]) -> None:
    """Columns as wide as what is in them, below their titles."""
    table = [titles.split(), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
