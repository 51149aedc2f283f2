"""Limits on a chat template: operations, characters processed, size of the largest value.

An operation or a loop iteration costs one step, long texts and lists a little more. The budget
grows with the input, so that a long conversation is never refused and a template that multiplies
its input without end always is. Values are measured too, shared parts as often as they occur, and
none may exceed a limit. Counting steps makes the result deterministic; a time limit covers
operations that the counter does not see.
"""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, KeysView, ValuesView
from contextvars import ContextVar
from typing import Any, NoReturn

_STEPS = 1_000_000
_MAX_SIZE = 4_000_000  # characters and items of one value, in addition to the input's
_MAX_INTEGER_BITS = 4_096
_TIMEOUT_S = 10.0
_CLOCK_INTERVAL = 10_000  # steps between two reads of the clock


class TemplateLimitError(Exception):
    """The template exceeded a limit; the message continues "the chat template ..."."""


class TemplateBudget:
    def __init__(self, variables: Any = None) -> None:
        self._remaining = self._max_size = 1 << 60  # measure the input without limit
        self._deadline = float("inf")
        self._next_clock = 0
        self._sizes: dict[int, tuple[Any, int]] = {}  # by id: value (kept alive) and size
        size = self.measure(variables)
        self._remaining = _STEPS + 16 * size
        self._max_size = _MAX_SIZE + 8 * size
        self._next_clock = self._remaining - _CLOCK_INTERVAL
        self._deadline = time.monotonic() + _TIMEOUT_S

    def refuse(self, reason: str) -> NoReturn:
        raise TemplateLimitError(reason)

    def spend(self, steps: int = 1) -> None:
        self._remaining -= steps
        if self._remaining < 0:
            self.refuse("does not end")
        if self._remaining < self._next_clock:
            self._next_clock = self._remaining - _CLOCK_INTERVAL
            if time.monotonic() > self._deadline:
                self.refuse(f"takes more than {_TIMEOUT_S:.0f} seconds")

    def check(self, size: int) -> None:
        """Raise if a value is too large."""
        if size > self._max_size:
            size_text = f"{size:,}" if size.bit_length() < 200 else "too many"
            self.refuse(f"builds a value of {size_text} characters and items")

    def charge_text(self, length: int) -> None:
        """Charge for a text of this length, before it is built where possible."""
        self.check(length)
        self.spend(1 + length // 512)

    def charge_widths(self, layout: str) -> None:
        """Charge for the field widths in a format such as `%20s`."""
        self.charge_text(sum(int(digits[:12]) for digits in re.findall(r"\d+", layout)))

    def measure(self, value: Any) -> int:
        """Charge for an operation on a value; return its size, nested values included."""
        self.spend()
        size = self._size(value)
        self.check(size)
        return size

    def _size(self, value: Any) -> int:
        if isinstance(value, str):
            self.spend(len(value) // 512)
            return 1 + len(value)
        if not isinstance(value, _CONTAINERS):
            return 1
        self.spend(1 + len(value) // 16)
        if isinstance(value, range):
            return 1 + len(value)
        # A template cannot modify lists and mappings, so each is measured only once.
        measured = self._sizes.get(id(value))
        if measured is None:
            self.spend(len(value) // 4)
            items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            measured = value, 1 + sum(map(self._size, items))
            self._sizes[id(value)] = measured
        return measured[1]

    def check_product(self, sign: str, left_value: Any, right_value: Any) -> None:
        """Check `left * right` or `left ** right` before it is computed."""
        if isinstance(left_value, int) and isinstance(right_value, int):
            bits = left_value.bit_length()
            bits = bits * right_value if sign == "**" else bits + right_value.bit_length()
            if bits > _MAX_INTEGER_BITS:
                self.refuse("computes an excessively large number")
        elif sign == "*":
            repeats, series = (
                (left_value, right_value)
                if isinstance(left_value, int)
                else (right_value, left_value)
            )
            if isinstance(repeats, int) and isinstance(series, str | list | tuple):
                self.charge_text(len(series) * repeats)


_CONTAINERS = (list, tuple, dict, set, range, KeysView, ValuesView, ItemsView)
current_budget: ContextVar[TemplateBudget | None] = ContextVar(
    "unspool_template_budget", default=None
)


def active_budget() -> TemplateBudget:
    """Return the budget of the current rendering, or a new one."""
    return current_budget.get() or TemplateBudget()
