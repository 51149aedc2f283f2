"""Regular expressions from a caller, made safe to run on every token.

Python's engine tries one way after another and cannot be interrupted, so a pattern that has
exponentially many ways to fail would freeze the engine. Those have a repeat inside a repeat, or a
repeat over alternatives that can begin alike; both are refused before anything runs.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

from unspool.errors import SettingsError

_MANY = 16  # a repeat that may run more often than this counts as unbounded
_LONGEST = 1000  # characters in a pattern


def compile_safely(pattern: str, flags: re.RegexFlag) -> re.Pattern[str]:
    """The compiled pattern, or a SettingsError that says what is wrong with it."""
    shown = repr(pattern if len(pattern) <= 60 else pattern[:57] + "...")
    if len(pattern) > _LONGEST:
        raise SettingsError(f"the pattern {shown} is longer than {_LONGEST} characters")
    try:
        compiled = re.compile(pattern, flags)
        empty = compiled.match("") is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise SettingsError(f"the pattern {shown} is not a regular expression: {error}") from error
    if empty:
        raise SettingsError(f"the pattern {shown} matches the empty text; it would ban everything")
    if _may_explode(pattern, compiled.flags):
        raise SettingsError(
            f"the pattern {shown} repeats something that can itself be read in many ways, and "
            "might never end; bound one repeat, as in {1,16}, or make it possessive, as in *+"
        )
    return compiled


def waits_for_more(pattern: str) -> bool:
    r"""Whether a match at the end of the text may be undone by the next character (\b, $, (?!)."""
    return re.search(r"\\[bBZ]|\$|\(\?[=!]", pattern) is not None


def _may_explode(pattern: str, flags: int) -> bool:
    try:
        parser: Any = importlib.import_module("re._parser")
    except ImportError:  # not a public module: a Python without it runs patterns unchecked
        return False
    return any(
        _unbounded(node) and any(_ambiguous(inner) for inner in _nodes(node[1][2]))
        for node in _nodes(parser.parse(pattern, flags))
    )


def _unbounded(node: tuple[Any, Any]) -> bool:
    # Possessive repeats never try a second way, and are not among these.
    return str(node[0]) in ("MAX_REPEAT", "MIN_REPEAT") and int(node[1][1]) > _MANY


def _ambiguous(node: tuple[Any, Any]) -> bool:
    """Whether there may be several ways to read the same text here."""
    if str(node[0]) == "BRANCH":
        # Alternatives that begin with different letters exclude each other. (The parser has
        # taken out what all of them begin with.)
        heads = [_first_letter(way) for way in node[1][1]]
        return None in heads or len(set(heads)) < len(heads)
    return str(node[0]) in ("MAX_REPEAT", "MIN_REPEAT") and node[1][0] != node[1][1]


def _first_letter(way: Any) -> str | None:
    """What an alternative begins with, whatever the case; None if that is no single letter."""
    known = len(way) > 0 and str(way[0][0]) == "LITERAL"
    return chr(way[0][1]).casefold() if known else None


def _nodes(parsed: Any) -> Iterator[tuple[Any, Any]]:
    """Every operation of a parsed pattern, depth first; what is atomic inside is left out."""
    for node in parsed:
        yield node
        name, value = str(node[0]), node[1]
        if name in ("POSSESSIVE_REPEAT", "ATOMIC_GROUP"):
            continue
        parts = value if isinstance(value, tuple | list) else [value]
        if name == "BRANCH":
            parts = value[1]
        for part in parts:
            if hasattr(part, "getwidth"):  # a part of the pattern, not a number or a letter
                yield from _nodes(part)
