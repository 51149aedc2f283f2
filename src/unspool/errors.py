"""The errors a user can cause, each with words that say what to do.

Everything a person can get wrong (a missing file, an impossible setting, a prompt that does not
fit) raises an `UnspoolError`. The command line prints its text on one line and exits with 2; a
Python caller can catch it, or `ValueError`, which it also is. Any other exception is a bug.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def count(number: int, noun: str) -> str:
    """A number with its noun, for messages: "1 token", "2,000 tokens"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class UnspoolError(ValueError):
    """Something the caller can put right; the message says what was wrong and what to do."""


class ModelFileError(UnspoolError):
    """A checkpoint, tokenizer or template that cannot be used as it is."""


class SettingsError(UnspoolError):
    """An option that is unknown, or outside what it may be."""


class DataError(UnspoolError):
    """Text to learn from that cannot be used as it is."""


class ContextError(UnspoolError):
    """More tokens than the model's context can hold."""


class BusyError(UnspoolError):
    """There is no room for this now; the same request may succeed later."""


class BatchError(UnspoolError):
    """Of many texts some went wrong; the others are written, and here.

    `generations` holds every text in its place, those that failed as far as they came; `errors`
    says by number what happened to these.
    """

    def __init__(
        self, message: str, generations: Sequence[object], errors: Mapping[int, Exception]
    ) -> None:
        super().__init__(message, generations, errors)
        self.generations, self.errors = generations, errors

    def __str__(self) -> str:
        return str(self.args[0])


class UnspoolWarning(UserWarning):
    """Something works, but not as well as it could; the message says why."""
