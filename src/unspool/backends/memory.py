"""How much memory keys and values may take, and recurrent states beside them."""

from __future__ import annotations

from unspool.errors import SettingsError
from unspool.model.memory import free_memory

__all__ = ["free_memory", "pages_and_states", "pages_in"]

LEAST_STATES = 4  # one that is read and one that is written, for two texts


def pages_in(memory: int, page: int) -> int:
    """How many pages fit."""
    if memory < page:
        raise SettingsError(
            f"memory is {memory:,} bytes, and a single page of keys and values takes {page:,}; "
            "allow more"
        )
    return int(memory // page)


def pages_and_states(memory: int, page: int, state: int) -> tuple[int, int]:
    """How many pages and how many slots for states of these sizes fit, both with their share.

    A page needs no more than one state, so small states get as many slots as there are pages. Large
    ones get half of the memory. `state` 0: the model has none.
    """
    if not state:
        return pages_in(memory, page), 0
    states = max(LEAST_STATES, min(memory // 2 // state, memory // (page + state)))
    if memory < states * state + page:
        raise SettingsError(
            f"memory is {memory:,} bytes; {LEAST_STATES} recurrent states take "
            f"{LEAST_STATES * state:,}, and a page of keys and values {page:,}; allow more"
        )
    return pages_in(memory - states * state, page), states
