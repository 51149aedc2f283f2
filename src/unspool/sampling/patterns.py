r"""Regular expressions from a caller, run in linear time on the engine's thread.

Python's `re` tries one way after another and cannot be interrupted, so one pattern could freeze
every request. RE2 reads each character once, whatever the pattern is; its memory and the size of
its programs are bounded here.

The syntax is RE2's: https://github.com/google/re2/wiki/Syntax. It differs from Python's `re`:
no look-around, back references, atomic groups or possessive repeats; `\d`, `\w`, `\s` and `\b` know
ASCII only (`\pL` is a letter of any script); `$` without `(?m)` and `\z` mean the end of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol

from unspool.errors import SettingsError

MOST_INSTRUCTIONS = 8192  # of all programs of one text together: a few milliseconds a token
_LONGEST = 1000  # characters in a pattern
_MEMORY = 1 << 19  # bytes for a pattern's program and its automaton


class PatternMatch(Protocol):
    """What is read of a match."""

    def start(self) -> int: ...

    def end(self) -> int: ...

    def group(self) -> str: ...


class LinearPattern(Protocol):
    """A compiled pattern. Safe to use from several threads."""

    @property
    def programsize(self) -> int:
        """Instructions of the compiled program."""

    def match(self, text: str) -> PatternMatch | None: ...

    def finditer(self, text: str, pos: int) -> Iterator[PatternMatch]: ...


def compile_linear(pattern: str, *, ignore_case: bool = False) -> LinearPattern:
    """Compile a pattern in RE2's syntax.

    Raises:
        SettingsError: It is not valid, not supported, too large, or matches the empty text.
    """
    import re2  # only a text with a pattern needs it

    shown = repr(pattern if len(pattern) <= 60 else pattern[:57] + "...")
    if len(pattern) > _LONGEST:
        raise SettingsError(
            f"the pattern {shown} has {len(pattern):,} characters; at most {_LONGEST:,} are allowed"
        )
    if not pattern.isascii() and re.search(r"\\[bB]", pattern):
        raise SettingsError(
            f"the pattern {shown} has \\b beside letters that are not ASCII, which \\b does not "
            r"know; use [^\pL] or $ for the border"
        )
    options = re2.Options()
    options.max_mem, options.case_sensitive, options.log_errors = _MEMORY, not ignore_case, False
    try:
        compiled: LinearPattern = re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        raise SettingsError(
            f"the pattern {shown} is not a regular expression that can be used: {_reason(error)}"
        ) from error
    finally:
        re2.purge()  # its cache would keep the memory of 128 patterns
    if compiled.match("") is not None:
        raise SettingsError(f"the pattern {shown} matches the empty text; it would ban everything")
    check_size(compiled.programsize)
    return compiled


def check_size(instructions: int) -> None:
    """Refuse programs that would take too long on every token."""
    if instructions > MOST_INSTRUCTIONS:
        raise SettingsError(
            f"the patterns of one text compile to {instructions:,} instructions; at most "
            f"{MOST_INSTRUCTIONS:,} are allowed: use fewer, or smaller repeats"
        )


def waits_for_more(pattern: str) -> bool:
    r"""Whether a match at the end of the text may be undone by the next character (\b, \z, $)."""
    return re.search(r"\\[bBz]|\$", pattern) is not None


def _reason(error: Exception) -> str:
    """RE2's own words, and what to write instead of what it does not support."""
    if isinstance(error, UnicodeEncodeError):
        return "it has half a character (a lone surrogate)"
    words = error.args[0] if error.args else b""
    text = words.decode("utf-8", "replace") if isinstance(words, bytes) else str(words)
    if "too large" in text:
        return "it is too large; use smaller repeats"
    if text.endswith("\\Z"):
        return f"{text}; write \\z for the end of the text"
    if "perl operator" in text or "escape sequence" in text or "repetition operator" in text:
        return (
            f"{text}; look-around, back references, atomic groups and possessive repeats are not "
            "supported (RE2 syntax)"
        )
    return text
