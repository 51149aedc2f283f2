r"""Regular expressions from a caller, matched in linear time on the engine thread.

Python's `re` backtracks and cannot be interrupted, so one pattern could block every request. RE2
reads each character once for any pattern; its memory and program size are bounded here.

The syntax is RE2's: https://github.com/google/re2/wiki/Syntax. It differs from Python's `re`:
no look-around, back references, atomic groups or possessive repeats; `\d`, `\w`, `\s` and `\b` are
ASCII only (`\pL` is a letter of any script); `$` without `(?m)` and `\z` mean the end of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol

from unspool.errors import SettingsError

MAX_INSTRUCTIONS = 8192  # of all patterns of a sequence: a few milliseconds per token
_MAX_PATTERN_LENGTH = 1000  # characters in a pattern
_MAX_PATTERN_BYTES = 1 << 19  # bytes for a pattern's program and its automaton


class PatternMatch(Protocol):
    """The part of RE2's match that is used here."""

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
        SettingsError: It is invalid, not supported, too large, or matches the empty string.
    """
    import re2  # only needed for patterns

    short_pattern = repr(pattern if len(pattern) <= 60 else pattern[:57] + "...")
    if len(pattern) > _MAX_PATTERN_LENGTH:
        raise SettingsError(
            f"the pattern {short_pattern} has {len(pattern):,} characters; the maximum is "
            f"{_MAX_PATTERN_LENGTH:,}"
        )
    if not pattern.isascii() and re.search(r"\\[bB]", pattern):
        raise SettingsError(
            f"the pattern {short_pattern} uses \\b with non-ASCII letters, which it does not match;"
            r" use [^\pL] or $ instead"
        )
    options = re2.Options()
    options.max_mem, options.case_sensitive, options.log_errors = (
        _MAX_PATTERN_BYTES,
        not ignore_case,
        False,
    )
    try:
        compiled: LinearPattern = re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        raise SettingsError(
            f"the pattern {short_pattern} is not a valid regular expression: {_reason(error)}"
        ) from error
    finally:
        re2.purge()  # its cache would hold 128 patterns
    if compiled.match("") is not None:
        raise SettingsError(
            f"the pattern {short_pattern} matches the empty string, so it would ban everything"
        )
    check_size(compiled.programsize)
    return compiled


def check_size(instructions: int) -> None:
    """Raise if the patterns would take too long per token."""
    if instructions > MAX_INSTRUCTIONS:
        raise SettingsError(
            f"the patterns compile to {instructions:,} instructions; the maximum is "
            f"{MAX_INSTRUCTIONS:,}: use fewer patterns or smaller repeats"
        )


def waits_for_more(pattern: str) -> bool:
    r"""Whether the next character may invalidate a match at the end of the text (\b, \z, $)."""
    return re.search(r"\\[bBz]|\$", pattern) is not None


def _reason(error: Exception) -> str:
    """RE2's message, with a hint for unsupported syntax."""
    if isinstance(error, UnicodeEncodeError):
        return "it contains a lone surrogate"
    message = error.args[0] if error.args else b""
    text = message.decode("utf-8", "replace") if isinstance(message, bytes) else str(message)
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
