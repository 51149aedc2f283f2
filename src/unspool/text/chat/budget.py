"""What a chat template may spend: turns of loops, characters handled, the largest value it makes.

One number goes down. A turn of a loop costs one, a list one an item, text one per 64 characters to
look at and one per 256 to copy. The budget grows with what the caller put in, so that a long
conversation is never refused, and a template that multiplies its input without end always is. A
clock stands behind it for what counting does not see.
"""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from typing import Any

from jinja2.utils import Namespace

_STEPS = 1_000_000
_LARGEST_TEXT = 4_000_000  # characters, more than the input has
_LARGEST_SIZE = 10_000  # a width, an indent, a count of columns
_LARGEST_BITS = 4_096  # of a whole number
_SECONDS = 10.0
_LOOK_AT_CLOCK = 10_000  # steps


class TemplateLimitError(Exception):
    """The template went over a limit; the text completes "the chat template ..."."""


class Budget:
    def __init__(self, variables: Any) -> None:
        self._left = 1 << 60  # the input itself is weighed without limit
        self._deadline = float("inf")
        self._next_look = 0
        chars = 64 * self.weigh(variables)
        self._left = _STEPS + 4 * chars
        self._next_look = self._left - _LOOK_AT_CLOCK
        self._largest = _LARGEST_TEXT + 8 * chars
        self._deadline = time.monotonic() + _SECONDS

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise TemplateLimitError("does not come to an end")
        if self._left < self._next_look:
            self._next_look = self._left - _LOOK_AT_CLOCK
            if time.monotonic() > self._deadline:
                raise TemplateLimitError(f"takes more than {_SECONDS:.0f} seconds")

    def text(self, length: int) -> None:
        """Pay for a text of this length, before it is made where that can be known."""
        if length > self._largest:
            raise TemplateLimitError(f"makes a text of {length:,} characters or more")
        self.spend(length // 256)

    def spend_shallow(self, value: Any) -> None:
        """Pay for looking at each item of a value, but not inside them."""
        if isinstance(value, str):
            self.spend(1 + len(value) // 64)
        elif isinstance(value, list | tuple | dict | range | set):
            self.spend(1 + len(value) // 16)

    def weigh(self, value: Any) -> int:
        """Pay for going through all of a value, shared parts as often as they occur."""
        if isinstance(value, str):
            cost = 1 + len(value) // 64
            self.spend(cost)
            return cost
        if value is None or isinstance(value, bool | int | float):
            self.spend(1)
            return 1
        total, waiting = 0, [value]
        while waiting:
            each = waiting.pop()
            cost = 1
            if isinstance(each, str):
                cost += len(each) // 64
            elif isinstance(each, dict | Mapping) and hasattr(each, "items"):
                waiting += each.keys()
                waiting += each.values()
            elif isinstance(each, list | tuple | set | KeysView | ValuesView | ItemsView):
                waiting += each
            elif isinstance(each, Namespace):
                waiting.append(each._Namespace__attrs)
            self.spend(cost)
            total += cost
        return total

    def check_sizes(self, values: tuple[Any, ...]) -> None:
        for value in values:
            if isinstance(value, int) and abs(value) > _LARGEST_SIZE:
                raise TemplateLimitError(f"asks for a width of {_shown(value)}")

    def check_operator(self, sign: str, left: Any, right: Any) -> None:
        self.spend(1)
        whole = isinstance(left, int) and isinstance(right, int)
        if sign == "+":
            if isinstance(left, str) and isinstance(right, str):
                self.text(len(left) + len(right))
            else:
                self.spend_shallow(left)
                self.spend_shallow(right)
        elif sign == "*" and whole:
            if left.bit_length() + right.bit_length() > _LARGEST_BITS:
                raise TemplateLimitError("makes an absurdly large number")
        elif sign == "*":
            series, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(times, int) and isinstance(series, str):
                self.text(len(series) * times)
            elif isinstance(times, int) and isinstance(series, list | tuple):
                self.spend(max(0, len(series) * times))
        elif sign == "**" and whole:
            if right > 0 and left.bit_length() * right > _LARGEST_BITS:
                raise TemplateLimitError("makes an absurdly large number")
        elif sign == "%" and isinstance(left, str):
            self.check_printf(left, right)

    def check_printf(self, layout: str, values: Any) -> None:
        self.weigh(layout)
        self.weigh(values)
        if re.search(r"%[^a-zA-Z%]*\*", layout):
            raise TemplateLimitError("asks for a width that is itself computed")
        self.check_widths(layout)

    def check_widths(self, layout: str) -> None:
        self.text(sum(int(digits[:12]) for digits in re.findall(r"\d+", layout)))

    def check_filter(self, name: str, values: tuple[Any, ...]) -> None:
        if name == "format":
            self.check_printf(str(values[0]), values[1:])
        elif name == "replace" and len(values) > 2:
            self._check_replace(str(values[0]), str(values[1]), str(values[2]))
        elif name in ("join", "indent", "tojson") and len(values) > 1:
            # at most one separator, or one indent, for each line or item
            value, *rest = values
            rest += [each for r in rest if isinstance(r, list | tuple) for each in r]
            extra = max((len(r) if isinstance(r, str) else r for r in rest if _sizes(r)), default=0)
            if isinstance(value, str):
                self.text((len(value) if name == "join" else value.count("\n") + 1) * extra)
            else:
                self.text(self.weigh(value) * (extra if name != "tojson" else 32 * extra))
        elif name == "sum" and any(isinstance(each, list | tuple) for each in values[1:]):
            raise TemplateLimitError("adds up lists, which takes the square of their length")

    def check_method(self, name: str, owner: Any, args: tuple[Any, ...]) -> None:
        """Pay for what a string method is about to make."""
        if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
            width = args[0] if args and isinstance(args[0], int) else 8
            self.text(width * (owner.count("\t") if name == "expandtabs" else 1))
        elif name == "join" and args:
            self.text(sum(len(owner) + len(str(item)) for item in args[0]))
        elif name == "replace" and len(args) > 1:
            self._check_replace(owner, str(args[0]), str(args[1]))
        elif isinstance(owner, str):
            self.text(len(owner))

    def _check_replace(self, text: str, old: str, new: str) -> None:
        self.text(len(text) + text.count(old) * len(new))


def _sizes(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _shown(value: int) -> str:
    return f"{value:,}" if value.bit_length() < 200 else "more than can be written"
