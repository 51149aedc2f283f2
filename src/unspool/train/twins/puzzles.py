"""Puzzles to train on: Sudoku and Countdown, with exact checks."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from unspool.errors import SettingsError
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.batches import TrainingBatch

# -- Sudoku: 81 cells, row by row; a dot is an empty cell
#
#     53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79
#     534678912672195348198342567859761423426853791713924856961537284287419635345286179
#
# Full boards are derived from a few that a search found, by the symmetries of Sudoku: permuted
# digits, rows in a band, bands, columns likewise, and transposition, about 10^12 boards from one.
# Cells are emptied at random; some boards then have several solutions, and each is correct.
# `sudoku4` is the small variant: four digits, 16 cells.

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


# -- Countdown: reach a target number from others with the four arithmetic operations

Integers = np.ndarray[Any, np.dtype[np.int64]]
Characters = np.ndarray[Any, np.dtype[np.uint8]]

_MAX_RESULT = 999  # of an intermediate equation
_OPERATORS = np.frombuffer(b"+-*/", np.uint8)
_EQUATION = re.compile(r" *(\d+)([-+*/]) *(\d+)= *(\d+)")


@dataclass(frozen=True, slots=True)
class Countdown:
    """`numbers` numbers from 1 to 99, and a target from 10 to 100."""

    numbers: int = 4

    @classmethod
    def from_name(cls, name: str, options: str) -> Countdown:
        numbers = int(options) if options.isdigit() else 4 if not options else 0
        if not 2 <= numbers <= 6:
            raise SettingsError(f"{name}:{options}: the number count must be from 2 to 6")
        return cls(numbers)

    @property
    def name(self) -> str:
        return "countdown"

    @property
    def letters(self) -> str:
        return "0123456789+-*/=,; "

    @property
    def prompt_length(self) -> int:
        return 3 * self.numbers + 4

    @property
    def answer(self) -> int:
        return 12 * (self.numbers - 1) - 1

    def generate(self, count: int, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        prompts: list[str] = []
        answers: list[str] = []
        while len(prompts) < count:
            numbers = rng.integers(1, 100, size=(4 * count, self.numbers))
            equations, target = _play(numbers, rng)
            good = np.flatnonzero((target >= 10) & (target <= 100))[: count - len(prompts)]
            listed = [part for column in numbers[good].T for part in (_align_right(column, 2), ",")]
            prompts += _join_columns(*listed[:-1], "=", _align_right(target[good], 3), ";")
            parts: list[Characters | str] = []
            for first, operator, second, result in equations[good].transpose(1, 2, 0):
                parts += [_align_right(first, 3), _OPERATORS[operator][:, None]]
                parts += [_align_right(second, 3), "=", _align_right(result, 3), ","]
            answers += _join_columns(*parts[:-1])
        return prompts, answers

    def is_solved(self, prompt: str, answer: str) -> bool:
        if len(prompt) != self.prompt_length or len(answer) != self.answer:
            return False
        listed, _, target = prompt.rstrip(";").partition("=")
        available = [int(number) for number in listed.split(",")]
        for equation in answer.split(","):
            match = _EQUATION.fullmatch(equation)
            if match is None:
                return False
            first, operator, second, result = int(match[1]), match[2], int(match[3]), int(match[4])
            for number in (first, second):
                if number not in available:
                    return False
                available.remove(number)
            if _evaluate(first, operator, second) != result:
                return False
            available.append(result)
        return available == [int(target)]


def _align_right(numbers: Integers, width: int) -> Characters:
    """Numbers >= 1 as right-aligned digits: [count, width]."""
    powers = 10 ** np.arange(width - 1, -1, -1)
    digits = numbers[:, None] // powers % 10 + ord("0")
    return np.where(numbers[:, None] >= powers, digits, ord(" ")).astype(np.uint8)


def _join_columns(*parts: Characters | str) -> list[str]:
    """Join character columns to texts; a str is the same character in all of them."""
    rows = next(len(part) for part in parts if not isinstance(part, str))
    columns = [
        np.full((rows, 1), ord(part), np.uint8) if isinstance(part, str) else part for part in parts
    ]
    return [row.tobytes().decode("ascii") for row in np.concatenate(columns, 1)]


def _evaluate(first: int, operator: str, second: int) -> int | None:
    """Result of an equation; None if it is not allowed."""
    if operator == "/":
        result = first // second if second and first % second == 0 else 0
    else:
        result = {"+": first + second, "-": first - second, "*": first * second}[operator]
    return result if 1 <= result <= _MAX_RESULT else None


def _play(numbers: Integers, rng: np.random.Generator) -> tuple[Integers, Integers]:
    """Combine the numbers of each row [rows, numbers] at random until one remains.

    Returns the equations [rows, numbers - 1, 4] as (number, operator, number, result), and the last
    result (0: no allowed operation).
    """
    available, equations, good = numbers, [], np.ones(len(numbers), bool)
    while available.shape[1] > 1:
        order = np.argsort(rng.random(available.shape), axis=1)
        shuffled = np.take_along_axis(available, order, 1)
        first, second = shuffled[:, 0], shuffled[:, 1]
        results = np.stack([first + second, first - second, first * second, first // second], 1)
        allowed = (results >= 1) & (results <= _MAX_RESULT)
        allowed[:, 3] &= first % second == 0
        good &= allowed.any(1)
        operator = np.where(allowed, rng.random(allowed.shape), -1.0).argmax(1)
        result = np.take_along_axis(results, operator[:, None], 1)
        equations.append(np.stack([first, operator, second, result[:, 0]], 1))
        available = np.concatenate([shuffled[:, 2:], result], 1)
    return np.stack(equations, 1), np.where(good, available[:, 0], 0)


# -- Puzzles: generated prompts and answers, a verifier, and a character vocabulary

END, MASK = "<end>", "<mask>"
HELD_OUT = 1 << 20  # number of the first batch for evaluation


class Puzzle(Protocol):
    """A kind of puzzle."""

    @property
    def name(self) -> str: ...

    @property
    def letters(self) -> str:
        """All characters of its texts."""
        ...

    @property
    def prompt_length(self) -> int:
        """Length of a prompt."""
        ...

    @property
    def answer(self) -> int:
        """Length of an answer."""
        ...

    def generate(self, count: int, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        """Generate `count` prompts and their answers."""
        ...

    def is_solved(self, prompt: str, answer: str) -> bool:
        """Whether an answer is correct; a prompt may have several correct answers."""
        ...


PUZZLES: dict[str, Callable[[str, str], Puzzle]] = {
    "sudoku": Sudoku.from_name,
    "sudoku4": Sudoku.from_name,
    "countdown": Countdown.from_name,
}


def puzzle_by_name(name: str) -> Puzzle:
    """Puzzle by name: `sudoku`, `sudoku:48` (empty cells), `sudoku:30-56`, `countdown:3`, ..."""
    kind, _, options = name.partition(":")
    if kind not in PUZZLES:
        raise SettingsError(f"unknown puzzle {name!r}; choose from {', '.join(PUZZLES)}")
    return PUZZLES[kind](kind, options)


def token_ids(puzzle: Puzzle) -> dict[str, int]:
    """The vocabulary: end token, mask token, and the characters."""
    return {token: number for number, token in enumerate((END, MASK, *puzzle.letters))}


def save_tokenizer(puzzle: Puzzle, folder: Path) -> Tokenizer:
    """Write the vocabulary as a tokenizer for transformers and `Tokenizer.from_file`."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = {_byte_level_token(t, byte_level): number for t, number in token_ids(puzzle).items()}
    library = Library(models.BPE(ids, []))
    library.pre_tokenizer = byte_level
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, special=True) for token in (END, MASK)])
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        f'{{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "{END}", '
        f'"mask_token": "{MASK}", "add_bos_token": false}}\n'
    )
    return Tokenizer.from_file(folder)


def _byte_level_token(token: str, byte_level: Any) -> str:
    """A token as byte-level vocabularies write it: a space is Ġ."""
    return token if len(token) > 1 else str(byte_level.pre_tokenize_str(token)[0][0])


def encode_texts(puzzle: Puzzle, texts: list[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Encode texts of one length: ids [texts, length]."""
    table = np.zeros(128, np.int64)
    for letter, number in token_ids(puzzle).items():
        if len(letter) == 1:
            table[ord(letter)] = number
    letters = np.frombuffer("".join(texts).encode("ascii"), np.uint8)
    return table[letters].reshape(len(texts), -1)


def decode_rows(puzzle: Puzzle, ids: np.ndarray[Any, np.dtype[np.int64]]) -> list[str]:
    """Decode rows of ids; end and mask tokens become "?"."""
    letters = {number: token for token, number in token_ids(puzzle).items()}
    return ["".join(t if len(t := letters[i]) == 1 else "?" for i in row) for row in ids.tolist()]


class PuzzleBatches:
    """New puzzles in every batch; batch n is a function of n, the seed and the rank.

    A thread generates the next batch during training on the current one.
    """

    def __init__(self, puzzle: Puzzle, rows: int, seed: int = 0, rank: int = 0) -> None:
        self.puzzle, self.batch_size, self.seed, self.rank = puzzle, rows, seed, rank
        self.length = puzzle.prompt_length + puzzle.answer
        self._maker = ThreadPoolExecutor(1)
        self._next: tuple[int, Future[TrainingBatch]] | None = None

    def rng(self, step: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.rank, step])

    def batch(self, step: int) -> TrainingBatch:
        is_ready = self._next is not None and self._next[0] == step
        batch = self._next[1].result() if self._next and is_ready else self._generate(step)
        self._next = step + 1, self._maker.submit(self._generate, step + 1)
        return batch

    def _generate(self, step: int) -> TrainingBatch:
        import torch  # lazily: a server generates and verifies puzzles without torch

        prompts, answers = self.puzzle.generate(self.batch_size, self.rng(step))
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        ends = np.full((self.batch_size, 1), token_ids(self.puzzle)[END])
        ids = torch.from_numpy(np.concatenate((encode_texts(self.puzzle, texts), ends), 1))
        loss_mask = torch.zeros(self.batch_size, self.length, dtype=torch.bool)
        loss_mask[:, self.puzzle.prompt_length - 1 :] = True
        return TrainingBatch(ids, loss_mask)
