"""What a chat template may spend: operations, characters handled, the largest value it makes.

One number goes down. A turn of a loop or an operation costs one, and a little more for long texts
and lists. The budget grows with what the caller put in, so that a long conversation is never
refused, and a template that multiplies its input without end always is. The values themselves are
weighed as well, shared parts as often as they occur, and none may be larger than a limit. Steps are
counted, so that the same template always ends in the same way; a clock stands behind the counter
for what it does not see.
"""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, KeysView, ValuesView
from contextvars import ContextVar
from typing import Any, NoReturn

_STEPS = 1_000_000
_LARGEST = 4_000_000  # characters and items of one value, more than the input has
_LARGEST_BITS = 4_096  # of a whole number
_SECONDS = 10.0
_CLOCK_INTERVAL = 10_000  # steps between two looks at the clock


class TemplateLimitError(Exception):
    """The template went over a limit; the text completes "the chat template ..."."""


class Budget:
    def __init__(self, variables: Any = None) -> None:
        self._left = self._largest = 1 << 60  # the input itself is weighed without limit
        self._deadline = float("inf")
        self._next_clock = 0
        self._weights: dict[int, tuple[Any, int]] = {}  # id -> value, which is so kept, and weight
        size = self.weigh(variables)
        self._left = _STEPS + 16 * size
        self._largest = _LARGEST + 8 * size
        self._next_clock = self._left - _CLOCK_INTERVAL
        self._deadline = time.monotonic() + _SECONDS

    def refuse(self, reason: str) -> NoReturn:
        raise TemplateLimitError(reason)

    def spend(self, steps: int = 1) -> None:
        self._left -= steps
        if self._left < 0:
            self.refuse("does not come to an end")
        if self._left < self._next_clock:
            self._next_clock = self._left - _CLOCK_INTERVAL
            if time.monotonic() > self._deadline:
                self.refuse(f"takes more than {_SECONDS:.0f} seconds")

    def check(self, size: int) -> None:
        """Refuse a text or a value that is too large."""
        if size > self._largest:
            shown = f"{size:,}" if size.bit_length() < 200 else "more than can be counted"
            self.refuse(f"makes a value of {shown} characters and items")

    def text(self, length: int) -> None:
        """Pay for a text of this length, before it is made where that can be known."""
        self.check(length)
        self.spend(1 + length // 512)

    def widths(self, layout: str) -> None:
        """Pay for the widths in a layout such as `%20s`."""
        self.text(sum(int(digits[:12]) for digits in re.findall(r"\d+", layout)))

    def weigh(self, value: Any) -> int:
        """Pay for an operation on a value; gives the value's size with all that is inside it."""
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
        # Lists and mappings cannot be changed by a template, so each is gone through only once.
        known = self._weights.get(id(value))
        if known is None:
            self.spend(len(value) // 4)
            items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            known = value, 1 + sum(map(self._size, items))
            self._weights[id(value)] = known
        return known[1]

    def product(self, sign: str, left: Any, right: Any) -> None:
        """Check `left * right` or `left ** right` before it is computed."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits * right if sign == "**" else bits + right.bit_length()
            if bits > _LARGEST_BITS:
                self.refuse("makes an absurdly large number")
        elif sign == "*":
            times, series = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and isinstance(series, str | list | tuple):
                self.text(len(series) * times)


_CONTAINERS = (list, tuple, dict, set, range, KeysView, ValuesView, ItemsView)
current_budget: ContextVar[Budget | None] = ContextVar("unspool_template_budget", default=None)


def active_budget() -> Budget:
    """The budget of the rendering that is under way, or a fresh one."""
    return current_budget.get() or Budget()
