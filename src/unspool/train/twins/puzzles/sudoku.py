"""Sudoku: 81 cells, row by row; a dot is an empty one.

    53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79
    534678912672195348198342567859761423426853791713924856961537284287419635345286179

Full boards are made from a few that were found by search, by what changes no rule: other digits,
other orders of rows in a band, of bands, and of columns likewise, and turning over. One board gives
about a million million. Cells are emptied at random; some boards then have several solutions, and
any of them is right.
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
_CELL = np.arange(81)
_UNITS = np.stack([
    *(_CELL.reshape(9, 9)), *(_CELL.reshape(9, 9).T),
    *(_CELL.reshape(3, 3, 3, 3).swapaxes(1, 2).reshape(9, 9)),
])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sudoku:
    """Boards with so many empty cells."""

    fewest: int = 20
    most: int = 56
    name: str = "sudoku"
    letters: str = ".123456789"
    prompt: int = 81
    answer: int = 81

    @classmethod
    def called(cls, more: str) -> Sudoku:
        """The empty cells: nothing, `48`, or `30-56`."""
        try:
            fewest, most = _range(more)
        except ValueError:
            raise SettingsError(
                f"sudoku:{more} does not say how many cells are empty: sudoku:48, sudoku:30-56"
            ) from None
        if not 1 <= fewest <= most <= 64:
            raise SettingsError(f"{fewest} to {most} empty cells; there may be 1 to 64")
        return cls(fewest, most)

    def made(self, count: int, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        boards = shuffled(found_boards()[rng.integers(_FOUND, size=count)], rng)
        empty = rng.integers(self.fewest, self.most + 1, size=(count, 1))
        order = rng.random((count, 81)).argsort(1).argsort(1)
        shown = np.where(order < empty, 0, boards)
        return _texts(shown), _texts(boards)

    def solved(self, prompt: str, answer: str) -> bool:
        if len(answer) != 81 or len(prompt) != 81 or not set(answer) <= set("123456789"):
            return False
        given = all(p in (".", a) for p, a in zip(prompt, answer, strict=True))
        digits = np.frombuffer(answer.encode(), np.uint8)
        return given and bool((np.sort(digits[_UNITS], 1) == np.arange(9) + ord("1")).all())


def _range(more: str) -> tuple[int, int]:
    first, _, last = (more or "20-56").partition("-")
    return int(first), int(last or first)


def _texts(boards: Boards) -> list[str]:
    letters = np.where(boards == 0, ord("."), boards + ord("0")).astype(np.uint8)
    return [row.tobytes().decode("ascii") for row in letters]


def shuffled(boards: Boards, rng: np.random.Generator) -> Boards:
    """Another board for each [count, 81], by what changes no rule."""
    count = len(boards)
    digits = rng.random((count, 9)).argsort(1) + 1
    square = np.take_along_axis(digits, boards - 1, 1).reshape(count, 9, 9)
    square = np.take_along_axis(square, _order(count, rng)[:, :, None], 1)
    square = np.take_along_axis(square, _order(count, rng)[:, None, :], 2)
    turned = rng.random((count, 1, 1)) < 0.5
    return np.where(turned, square.swapaxes(1, 2), square).reshape(count, 81)


def _order(count: int, rng: np.random.Generator) -> Boards:
    """Orders of nine lines that keep the three of a band together."""
    bands = rng.random((count, 3)).argsort(1)
    within = rng.random((count, 3, 3)).argsort(2)
    return (bands[:, :, None] * 3 + within).reshape(count, 9)


@cache
def found_boards() -> Boards:
    """The boards that all others are made from: always the same ones."""
    rng = random.Random(0)
    return np.array([_searched(rng) for _ in range(_FOUND)])


def _searched(rng: random.Random) -> list[int]:
    """A full board, by trying digits in the cell that has fewest left."""
    board = [0] * 81
    units = [[u for u in range(27) if cell in _UNITS[u]] for cell in range(81)]
    used = [0] * 27  # digits of each row, column and box, as bits

    def fill() -> bool:
        best, options = -1, []
        for cell in range(81):
            if board[cell]:
                continue
            taken = used[units[cell][0]] | used[units[cell][1]] | used[units[cell][2]]
            free = [digit for digit in range(1, 10) if not taken >> digit & 1]
            if best < 0 or len(free) < len(options):
                best, options = cell, free
            if len(options) <= 1:
                break
        if best < 0:
            return True
        rng.shuffle(options)
        for digit in options:
            board[best] = digit
            for unit in units[best]:
                used[unit] ^= 1 << digit
            if fill():
                return True
            board[best] = 0
            for unit in units[best]:
                used[unit] ^= 1 << digit
        return False

    fill()
    return board
