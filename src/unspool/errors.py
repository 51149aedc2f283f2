"""Errors that a user can cause; each message says what is wrong and what to do.

A missing file, an invalid setting or a prompt that does not fit raises an `UnspoolError`. The
command line prints its message on one line and exits with 2; a Python caller can catch it, or
`ValueError`, its base class. Any other exception is a bug.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence


def count(number: int, noun: str) -> str:
    """Return a number with its noun, for messages: "1 token", "2,000 tokens"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class UnspoolError(ValueError):
    """An error that the caller can fix; the message says what is wrong and what to do."""


class ModelFileError(UnspoolError):
    """A checkpoint, tokenizer or template that cannot be used."""


class SettingsError(UnspoolError):
    """An option that is unknown or out of range."""


class DataError(UnspoolError):
    """Training data that cannot be used."""


class ContextError(UnspoolError):
    """More tokens than the model's context holds; with both numbers, where known."""

    def __init__(
        self, message: str, *, num_tokens: int | None = None, context: int | None = None
    ) -> None:
        super().__init__(message)
        self.num_tokens, self.context = num_tokens, context


class StorageError(UnspoolError):
    """A change could not be stored: the disk is full, or the database is damaged."""


class BusyError(UnspoolError):
    """There is no capacity now; the same request may succeed later."""


class WorkCancelledError(UnspoolError):
    """The work was cancelled from another thread before it was finished."""


class BatchError(UnspoolError):
    """Some texts of a batch failed; the others are complete.

    `generations` has every text in order, failed ones as far as they were generated; `errors` has
    the errors by index.
    """

    def __init__(
        self, message: str, generations: Sequence[object], errors: Mapping[int, Exception]
    ) -> None:
        super().__init__(message, generations, errors)
        self.generations, self.errors = generations, errors

    def __str__(self) -> str:
        return str(self.args[0])


class UnspoolWarning(UserWarning):
    """Something works less well than it could; the message says why."""


def check_int(name: str, value: object, least: int | None = 0, most: int | None = None) -> int:
    """Return the value as an int within its bounds, or raise SettingsError."""
    is_int = hasattr(type(value), "__index__") and not isinstance(value, bool)
    number = operator.index(value) if is_int else 0  # type: ignore[arg-type]
    too_small = least is not None and number < least
    if not is_int or too_small or (most is not None and number > most):
        raise SettingsError(f"{name} must be an integer{_bounds(least, most)}, got {value!r}")
    return number


def check_number(
    name: str, value: object, least: float | None = None, most: float | None = None
) -> float:
    """Return the value as a float within its bounds, or raise SettingsError."""
    is_number = hasattr(type(value), "__float__") and not isinstance(value, bool | str)
    number = float(value) if is_number else math.nan  # type: ignore[arg-type]
    too_small = least is not None and number < least
    if not math.isfinite(number) or too_small or (most is not None and number > most):
        raise SettingsError(f"{name} must be a number{_bounds(least, most)}, got {value!r}")
    return number


def check_bool(name: str, value: object) -> bool:
    """Return the value as a bool, or raise SettingsError."""
    if type(value).__name__ not in ("bool", "bool_"):  # numpy's too
        raise SettingsError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _bounds(least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f" from {least} to {most}"
    if least is not None:
        return f" >= {least}"
    return "" if most is None else f" <= {most}"
