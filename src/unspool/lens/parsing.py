"""Checking what a JSON file says, piece by piece: the right value, or one line that says why not.

A parser takes a value and where it stands. Small parsers are put together into larger ones:

    point = record(Point, x=number(), y=number())
    points = many(point)
    points([{"x": 1.0, "y": 2.0}], "points")
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

from unspool.errors import UnspoolError

T = TypeVar("T")
Parser = Callable[[Any, str], T]

_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def refuse(value: Any, where: str, wanted: str) -> UnspoolError:
    return UnspoolError(f"{where} is {reprlib.repr(value)}; it must be {wanted}")


def whole(least: int | None = 0, most: int | None = 2**63 - 1) -> Parser[int]:
    """A whole number; None: no bound on that side."""
    bounds = f" from {least}" * (least is not None) + f" to {most}" * (most is not None)

    def parse(value: Any, where: str) -> int:
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or (least is not None and value < least)
            or (most is not None and value > most)
        ):
            raise refuse(value, where, f"a whole number{bounds}")
        return value

    return parse


def number(
    least: float = -math.inf, most: float = math.inf, *, above: bool = False
) -> Parser[float]:
    """A number within bounds; without bounds also `inf`, `-inf` and `nan`, which JSON lacks."""
    unbounded = least == -math.inf and most == math.inf

    def parse(value: Any, where: str) -> float:
        if unbounded and isinstance(value, str) and value in _NOT_FINITE:
            return _NOT_FINITE[value]
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared before it is made a float: an int may be too large for one.
        if fits and (least < value if above else least <= value) and value <= most:
            try:
                found = float(value)
            except OverflowError:
                found = math.inf
            if math.isfinite(found):
                return found
        bounds = "" if unbounded else f" from {least:g} to {most:g}"
        raise refuse(value, where, f"a number{bounds}{f', not {least:g}' if above else ''}")

    return parse


def text(most: int = 1_000_000) -> Parser[str]:
    def parse(value: Any, where: str) -> str:
        if not isinstance(value, str) or len(value) > most:
            raise refuse(value, where, f"text of at most {most:,} characters")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise refuse(value, where, "text without half characters")
        return value

    return parse


def flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise refuse(value, where, "true or false")
    return value


def mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(value, where, "an object")
    return value


def one_of(*allowed: str) -> Parser[str]:
    def parse(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise refuse(value, where, f"one of {', '.join(allowed)}")
        return value

    return parse


def optional(parser: Parser[T]) -> Parser[T | None]:
    def parse(value: Any, where: str) -> T | None:
        return None if value is None else parser(value, where)

    return parse


def many(parser: Parser[T], most: int = 10_000_000) -> Parser[tuple[T, ...]]:
    def parse(value: Any, where: str) -> tuple[T, ...]:
        if not isinstance(value, list) or len(value) > most:
            raise refuse(value, where, f"a list of at most {most:,}")
        return tuple(parser(item, f"{where}[{number}]") for number, item in enumerate(value))

    return parse


def pair(first: Parser[Any], second: Parser[Any]) -> Parser[tuple[Any, Any]]:
    def parse(value: Any, where: str) -> tuple[Any, Any]:
        if not isinstance(value, list) or len(value) != 2:
            raise refuse(value, where, "a list of two")
        return first(value[0], f"{where}[0]"), second(value[1], f"{where}[1]")

    return parse


def octets(value: Any, where: str) -> bytes:
    """Bytes, written as a list of numbers."""
    return bytes(many(whole(0, 255))(value, where))


def fields(value: Any, where: str, parsers: dict[str, Parser[Any]]) -> dict[str, Any]:
    """The named fields of an object, each checked; others are left alone."""
    given = mapping(value, where or "the file")
    found = {}
    for name, parser in parsers.items():
        place = f"{where}.{name}" if where else name
        if name not in given:
            raise UnspoolError(f"{place} is missing")
        found[name] = parser(given[name], place)
    return found


def record(make: Callable[..., T], **parsers: Parser[Any]) -> Parser[T]:
    """An object with these fields, made into what they are the arguments of."""

    def parse(value: Any, where: str) -> T:
        return make(**fields(value, where, parsers))

    return parse
