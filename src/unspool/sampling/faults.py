"""Errors while picking tokens.

Each carries `rows`, the rows of the batch that caused it, so that the engine can fail these
requests only and pick again for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from unspool.errors import SettingsError, UnspoolError


class RowError(Exception):
    """Base of errors that concern some rows of a batch only."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class BadLogitsError(RowError, UnspoolError):
    """The model's logits are not usable: NaN, or all -inf."""


class StageError(RowError, SettingsError):
    """A caller's stage function failed."""


class NoCandidateError(RowError, SettingsError):
    """The settings forbid every token of the vocabulary."""


ROW_ERRORS = (BadLogitsError, StageError, NoCandidateError)
"""Errors that concern some rows only."""
