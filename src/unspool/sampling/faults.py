"""What can go wrong while a token is picked, and for which rows of the batch.

All errors carry `rows`, the numbers of the rows at fault, so that an engine can fail those
requests alone and pick again for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from unspool.errors import SettingsError, UnspoolError


class BadLogitsError(UnspoolError):
    """The model gave no usable distribution: NaN, or no token at all."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class StageError(SettingsError):
    """A stage that a caller wrote went wrong."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class NoCandidateError(SettingsError):
    """The settings forbid every token of the vocabulary."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


ROW_FAULTS = (BadLogitsError, StageError, NoCandidateError)
"""What concerns some rows alone."""
