"""Countdown: reach a target number from others with the four arithmetic operations.

    86,28,13,31= 96;
    86+ 28=114, 31- 13= 18,114- 18= 96

Every number is used once, in a sequence of equations; all results are integers of at least one
(arXiv 2404.03683). Numbers are right-aligned to a fixed width, so that all rows have one length.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.errors import SettingsError

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
