"""How much memory keys and values may take."""

from __future__ import annotations

from unspool.errors import SettingsError
from unspool.model.memory import free_memory

__all__ = ["free_memory", "pages_in"]


def pages_in(memory: int, page: int) -> int:
    """How many pages fit."""
    if memory < page:
        raise SettingsError(
            f"memory is {memory:,} bytes, and a single page of keys and values takes {page:,}; "
            "allow more"
        )
    return int(memory // page)
