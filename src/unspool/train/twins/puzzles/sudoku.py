"""Sudoku: 81 cells, row by row; a dot is an empty cell.

    53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79
    534678912672195348198342567859761423426853791713924856961537284287419635345286179

Full boards are derived from a few that a search found, by the symmetries of Sudoku: permuted
digits, rows in a band, bands, columns likewise, and transposition, about 10^12 boards from one.
Cells are emptied at random; some boards then have several solutions, and each is correct. `sudoku4`
is the small variant: four digits, 16 cells.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from unspool.errors import SettingsError

Boards = np.ndarray[Any, np.dtype[np.int64]]

_NUM_BASE_BOARDS = 64


@dataclass(frozen=True, slots=True)
class Sudoku:
    """Boards with `fewest` to `most` empty cells; `box` is the side of a box."""

    fewest: int = 20
    most: int = 56
    box: int = 3

    @classmethod
    def from_name(cls, name: str, options: str) -> Sudoku:
        """`options` is the number of empty cells: empty, `48`, or `30-56`."""
        box, default, limit = (2, "4-11", 13) if name == "sudoku4" else (3, "20-56", 64)
        try:
            fewest, most = _parse_range(options or default)
        except ValueError:
            raise SettingsError(
                f"{name}:{options}: give the number of empty cells, such as {name}:{default}"
            ) from None
        if not 1 <= fewest <= most <= limit:
            raise SettingsError(f"empty cells must be from 1 to {limit}, got {fewest} to {most}")
        return cls(fewest, most, box)

    @property
    def name(self) -> str:
        return "sudoku" if self.box == 3 else "sudoku4"

    @property
    def letters(self) -> str:
        return ".123456789"[: 1 + self.box**2]

    @property
    def prompt_length(self) -> int:
        return self.box**4

    answer = prompt_length

    def generate(self, count: int, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        cells = self.box**4
        boards = base_boards(self.box)[rng.integers(_NUM_BASE_BOARDS, size=count)]
        boards = shuffled(boards, self.box, rng)
        empty = rng.integers(self.fewest, self.most + 1, size=(count, 1))
        order = rng.random((count, cells))
        threshold = np.take_along_axis(np.sort(order, 1), empty, 1)  # `empty` values are smaller
        return _to_texts(np.where(order < threshold, 0, boards)), _to_texts(boards)

    def is_solved(self, prompt: str, answer: str) -> bool:
        cells, digits = self.box**4, self.letters[1:]
        if len(answer) != cells or len(prompt) != cells or not set(answer) <= set(digits):
            return False
        matches = all(p in (".", a) for p, a in zip(prompt, answer, strict=True))
        numbers = np.frombuffer(answer.encode(), np.uint8)[_units(self.box)] - ord("0")
        return matches and bool((np.sort(numbers, 1) == np.arange(1, len(digits) + 1)).all())


@cache
def _units(box: int) -> Boards:
    """Cell indices of all rows, columns and boxes."""
    side, cells = box**2, np.arange(box**4)
    square = cells.reshape(side, side)
    boxes = cells.reshape(box, box, box, box).swapaxes(1, 2).reshape(side, side)
    return np.concatenate((square, square.T, boxes))


def _parse_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def _to_texts(boards: Boards) -> list[str]:
    letters = np.where(boards == 0, ord("."), boards + ord("0")).astype(np.uint8)
    return [row.tobytes().decode("ascii") for row in letters]


def shuffled(boards: Boards, box: int, rng: np.random.Generator) -> Boards:
    """Apply random symmetries of Sudoku to each board [count, cells]."""
    count, side = len(boards), box**2
    digits = rng.random((count, side)).argsort(1) + 1
    square = np.take_along_axis(digits, boards - 1, 1).reshape(count, side, side)
    square = np.take_along_axis(square, _line_order(count, box, rng)[:, :, None], 1)
    square = np.take_along_axis(square, _line_order(count, box, rng)[:, None, :], 2)
    transposed = rng.random((count, 1, 1)) < 0.5
    return np.where(transposed, square.swapaxes(1, 2), square).reshape(count, -1)


def _line_order(count: int, box: int, rng: np.random.Generator) -> Boards:
    """Random orders of rows (or columns) that keep bands together."""
    bands = rng.random((count, box)).argsort(1)
    within = rng.random((count, box, box)).argsort(2)
    return (bands[:, :, None] * box + within).reshape(count, box**2)


@cache
def base_boards(box: int = 3) -> Boards:
    """The fixed boards from which all others are derived."""
    rng = random.Random(0)
    return np.array([_search_board(box, rng) for _ in range(_NUM_BASE_BOARDS)])


def _search_board(box: int, rng: random.Random) -> list[int]:
    """Find a full board by backtracking, in the cell with the fewest options first."""
    cells, side = box**4, box**2
    board = [0] * cells
    units = [np.flatnonzero((_units(box) == cell).any(1)).tolist() for cell in range(cells)]
    used = [0] * (3 * side)  # digits of each row, column and box, as bits

    def toggle(cell: int, digit: int) -> None:
        board[cell] ^= digit
        for unit in units[cell]:
            used[unit] ^= 1 << digit

    def fill() -> bool:
        best, options = -1, list[int]()
        for cell in (cell for cell in range(cells) if not board[cell]):
            row, column, square = units[cell]
            digits = used[row] | used[column] | used[square]
            free = [digit for digit in range(1, side + 1) if not digits >> digit & 1]
            if best < 0 or len(free) < len(options):
                best, options = cell, free
            if len(options) <= 1:
                break
        if best < 0:
            return True
        rng.shuffle(options)
        for digit in options:
            toggle(best, digit)
            if fill():
                return True
            toggle(best, digit)
        return False

    fill()
    return board
