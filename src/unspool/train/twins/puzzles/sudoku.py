"""Sudoku: 81 cells, row by row; a dot is an empty one.

    53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79
    534678912672195348198342567859761423426853791713924856961537284287419635345286179

Full boards are made from a few that were found by search, by what changes no rule: other digits,
other orders of rows in a band, of bands, and of columns likewise, and turning over. One board gives
about a million million. Cells are emptied at random; some boards then have several solutions, and
any of them is right. `sudoku4` is the small one: four digits, 16 cells.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from unspool.errors import SettingsError

Boards = np.ndarray[Any, np.dtype[np.int64]]

_FOUND = 64  # boards that all others are made from


@dataclass(frozen=True, slots=True)
class Sudoku:
    """Boards with so many empty cells; `box` cells along the side of a box."""

    fewest: int = 20
    most: int = 56
    box: int = 3

    @classmethod
    def called(cls, name: str, more: str) -> Sudoku:
        """The empty cells: nothing, `48`, or `30-56`."""
        box, usual, limit = (2, "4-11", 13) if name == "sudoku4" else (3, "20-56", 64)
        try:
            fewest, most = _range(more or usual)
        except ValueError:
            raise SettingsError(
                f"{name}:{more} does not say how many cells are empty: {name}:{usual}, for example"
            ) from None
        if not 1 <= fewest <= most <= limit:
            raise SettingsError(f"{fewest} to {most} empty cells; there may be 1 to {limit}")
        return cls(fewest, most, box)

    @property
    def name(self) -> str:
        return "sudoku" if self.box == 3 else "sudoku4"

    @property
    def letters(self) -> str:
        return ".123456789"[: 1 + self.box**2]

    @property
    def prompt(self) -> int:
        return self.box**4

    answer = prompt

    def made(self, count: int, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        cells = self.box**4
        boards = found_boards(self.box)[rng.integers(_FOUND, size=count)]
        boards = shuffled(boards, self.box, rng)
        empty = rng.integers(self.fewest, self.most + 1, size=(count, 1))
        drawn = rng.random((count, cells))
        border = np.take_along_axis(np.sort(drawn, 1), empty, 1)  # so many are smaller
        return _texts(np.where(drawn < border, 0, boards)), _texts(boards)

    def solved(self, prompt: str, answer: str) -> bool:
        cells, digits = self.box**4, self.letters[1:]
        if len(answer) != cells or len(prompt) != cells or not set(answer) <= set(digits):
            return False
        given = all(p in (".", a) for p, a in zip(prompt, answer, strict=True))
        numbers = np.frombuffer(answer.encode(), np.uint8)[_units(self.box)] - ord("0")
        return given and bool((np.sort(numbers, 1) == np.arange(1, len(digits) + 1)).all())


@cache
def _units(box: int) -> Boards:
    """The cells of each row, each column and each box."""
    side, cells = box**2, np.arange(box**4)
    square = cells.reshape(side, side)
    boxes = cells.reshape(box, box, box, box).swapaxes(1, 2).reshape(side, side)
    return np.concatenate((square, square.T, boxes))


def _range(more: str) -> tuple[int, int]:
    first, _, last = more.partition("-")
    return int(first), int(last or first)


def _texts(boards: Boards) -> list[str]:
    letters = np.where(boards == 0, ord("."), boards + ord("0")).astype(np.uint8)
    return [row.tobytes().decode("ascii") for row in letters]


def shuffled(boards: Boards, box: int, rng: np.random.Generator) -> Boards:
    """Another board for each [count, cells], by what changes no rule."""
    count, side = len(boards), box**2
    digits = rng.random((count, side)).argsort(1) + 1
    square = np.take_along_axis(digits, boards - 1, 1).reshape(count, side, side)
    square = np.take_along_axis(square, _order(count, box, rng)[:, :, None], 1)
    square = np.take_along_axis(square, _order(count, box, rng)[:, None, :], 2)
    turned = rng.random((count, 1, 1)) < 0.5
    return np.where(turned, square.swapaxes(1, 2), square).reshape(count, -1)


def _order(count: int, box: int, rng: np.random.Generator) -> Boards:
    """Orders of all lines that keep those of a band together."""
    bands = rng.random((count, box)).argsort(1)
    within = rng.random((count, box, box)).argsort(2)
    return (bands[:, :, None] * box + within).reshape(count, box**2)


@cache
def found_boards(box: int = 3) -> Boards:
    """The boards that all others are made from: always the same ones."""
    rng = random.Random(0)
    return np.array([_searched(box, rng) for _ in range(_FOUND)])


def _searched(box: int, rng: random.Random) -> list[int]:
    """A full board, by trying digits in the cell that has fewest left."""
    cells, side = box**4, box**2
    board = [0] * cells
    units = [np.flatnonzero((_units(box) == cell).any(1)).tolist() for cell in range(cells)]
    used = [0] * (3 * side)  # digits of each row, column and box, as bits

    def put(cell: int, digit: int) -> None:
        board[cell] ^= digit
        for unit in units[cell]:
            used[unit] ^= 1 << digit

    def fill() -> bool:
        best, options = -1, list[int]()
        for cell in (cell for cell in range(cells) if not board[cell]):
            row, column, own = units[cell]
            taken = used[row] | used[column] | used[own]
            free = [digit for digit in range(1, side + 1) if not taken >> digit & 1]
            if best < 0 or len(free) < len(options):
                best, options = cell, free
            if len(options) <= 1:
                break
        if best < 0:
            return True
        rng.shuffle(options)
        for digit in options:
            put(best, digit)
            if fill():
                return True
            put(best, digit)  # takes it back
        return False

    fill()
    return board
