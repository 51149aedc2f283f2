"""Countdown: reach a number from others by adding, taking away, multiplying and dividing.

    86,28,13,31= 96;
    86+ 28=114, 31- 13= 18,114- 18= 96

Every number is used once, in one sum after the other; nothing falls below one or has a fraction
(arXiv 2404.03683). Numbers stand right in places of their own, so that all rows are equally long.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.errors import SettingsError

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Letters = np.ndarray[Any, np.dtype[np.uint8]]

_LARGEST = 999  # on the way
_SIGNS = np.frombuffer(b"+-*/", np.uint8)
_SUM = re.compile(r" *(\d+)([-+*/]) *(\d+)= *(\d+)")


@dataclass(frozen=True, slots=True)
class Countdown:
    """So many numbers from 1 to 99, and a target from 10 to 100."""

    numbers: int = 4

    @classmethod
    def called(cls, name: str, more: str) -> Countdown:
        numbers = int(more) if more.isdigit() else 4 if not more else 0
        if not 2 <= numbers <= 6:
            raise SettingsError(f"{name}:{more} has no such numbers; it may be 2 to 6 of them")
        return cls(numbers)

    @property
    def name(self) -> str:
        return "countdown"

    @property
    def letters(self) -> str:
        return "0123456789+-*/=,; "

    @property
    def prompt(self) -> int:
        return 3 * self.numbers + 4

    @property
    def answer(self) -> int:
        return 12 * (self.numbers - 1) - 1

    def made(self, count: int, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        prompts: list[str] = []
        answers: list[str] = []
        while len(prompts) < count:
            numbers = rng.integers(1, 100, size=(4 * count, self.numbers))
            sums, target = _played(numbers, rng)
            good = np.flatnonzero((target >= 10) & (target <= 100))[: count - len(prompts)]
            listed = [part for each in numbers[good].T for part in (_right(each, 2), ",")]
            prompts += _texts(*listed[:-1], "=", _right(target[good], 3), ";")
            told: list[Letters | str] = []
            for one, sign, other, result in sums[good].transpose(1, 2, 0):
                told += [_right(one, 3), _SIGNS[sign][:, None], _right(other, 3), "="]
                told += [_right(result, 3), ","]
            answers += _texts(*told[:-1])
        return prompts, answers

    def solved(self, prompt: str, answer: str) -> bool:
        if len(prompt) != self.prompt or len(answer) != self.answer:
            return False
        listed, _, target = prompt.rstrip(";").partition("=")
        left = [int(number) for number in listed.split(",")]
        for each in answer.split(","):
            found = _SUM.fullmatch(each)
            if found is None:
                return False
            one, sign, other, result = int(found[1]), found[2], int(found[3]), int(found[4])
            for number in (one, other):
                if number not in left:
                    return False
                left.remove(number)
            if _result(one, sign, other) != result:
                return False
            left.append(result)
        return left == [int(target)]


def _right(numbers: Numbers, width: int) -> Letters:
    """Numbers of at least one, each written right in so many places: [count, width]."""
    powers = 10 ** np.arange(width - 1, -1, -1)
    digits = numbers[:, None] // powers % 10 + ord("0")
    return np.where(numbers[:, None] >= powers, digits, ord(" ")).astype(np.uint8)


def _texts(*parts: Letters | str) -> list[str]:
    """Texts whose parts stand side by side; a letter is the same in all of them."""
    rows = next(len(part) for part in parts if not isinstance(part, str))
    columns = [
        np.full((rows, 1), ord(part), np.uint8) if isinstance(part, str) else part for part in parts
    ]
    return [row.tobytes().decode("ascii") for row in np.concatenate(columns, 1)]


def _result(one: int, sign: str, other: int) -> int | None:
    """What a sum comes to; None if that is not allowed."""
    if sign == "/":
        found = one // other if other and one % other == 0 else 0
    else:
        found = {"+": one + other, "-": one - other, "*": one * other}[sign]
    return found if 1 <= found <= _LARGEST else None


def _played(numbers: Numbers, rng: np.random.Generator) -> tuple[Numbers, Numbers]:
    """Sums drawn at random until one number is left, for each row [rows, numbers] at once: the sums
    [rows, numbers - 1, 4] as number, sign, number, result; and the number that is left (0: there
    was nothing that is allowed)."""
    left, sums, good = numbers, [], np.ones(len(numbers), bool)
    while left.shape[1] > 1:
        order = np.argsort(rng.random(left.shape), axis=1)
        mixed = np.take_along_axis(left, order, 1)
        one, other = mixed[:, 0], mixed[:, 1]
        results = np.stack([one + other, one - other, one * other, one // other], 1)
        allowed = (results >= 1) & (results <= _LARGEST)
        allowed[:, 3] &= one % other == 0
        good &= allowed.any(1)
        sign = np.where(allowed, rng.random(allowed.shape), -1.0).argmax(1)
        result = np.take_along_axis(results, sign[:, None], 1)
        sums.append(np.stack([one, sign, other, result[:, 0]], 1))
        left = np.concatenate([mixed[:, 2:], result], 1)
    return np.stack(sums, 1), np.where(good, left[:, 0], 0)
