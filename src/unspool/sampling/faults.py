"""Errors while picking tokens.

Each carries `rows`, the rows of the batch that caused it, so that the engine can fail these
requests only and pick again for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from unspool.errors import SettingsError, UnspoolError


class BadLogitsError(UnspoolError):
    """The model's logits are not usable: NaN, or all -inf."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class StageError(SettingsError):
    """A caller's stage function failed."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class NoCandidateError(SettingsError):
    """The settings forbid every token of the vocabulary."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


ROW_FAULTS = (BadLogitsError, StageError, NoCandidateError)
"""Errors that concern some rows only."""
