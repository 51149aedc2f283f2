"""Dividing memory between KV cache pages and recurrent state slots."""

from __future__ import annotations

from unspool.errors import SettingsError
from unspool.model.memory import free_memory as free_memory  # re-exported

MIN_STATES = 4  # one to read and one to write, for two sequences


def num_pages_in(memory: int, page: int) -> int:
    """Number of pages of `page` bytes that fit into `memory` bytes."""
    if memory < page:
        raise SettingsError(
            f"memory must hold at least one KV cache page of {page:,} bytes, got {memory:,}; "
            "raise memory"
        )
    return int(memory // page)


def num_pages_and_states(memory: int, page: int, state: int) -> tuple[int, int]:
    """Number of pages and of state slots of these sizes, in bytes, that share `memory`.

    A page needs at most one state, so small states get one slot per page. Large states get half of
    the memory. `state` 0: the model has no recurrent layers.
    """
    if not state:
        return num_pages_in(memory, page), 0
    states = max(MIN_STATES, min(memory // 2 // state, memory // (page + state)))
    if memory < states * state + page:
        raise SettingsError(
            f"memory must hold {MIN_STATES} recurrent states ({MIN_STATES * state:,} bytes) and a "
            f"KV cache page ({page:,} bytes), got {memory:,}; raise memory"
        )
    return num_pages_in(memory - states * state, page), states
