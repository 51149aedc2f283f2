"""One sequence on a backend without an engine: append tokens, get logits, rewind.

The sequence owns all pages of its backend, in order. For a model with recurrent layers the states
after the last appends are kept; a rewind to another position recomputes from the nearest one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unspool.backends.step import Ints, LoadedModel, Logits, StepBatch, TableUpdates, empty_ints

_MAX_PAGE = 256  # tokens: memory for one partly filled page
_MAX_STATES = 32


class SingleSequence:
    """A sequence of at most `capacity` tokens with its own backend."""

    def __init__(self, model: LoadedModel, capacity: int) -> None:
        config = model.config
        config.require_causal()
        # No backend stores more than 32 bits per value; untouched pages take no memory.
        memory = (capacity + _MAX_PAGE) * config.kv_floats_per_token * 4
        if config.state_bytes:  # states get half of the memory
            memory = 2 * max(memory, _MAX_STATES * config.state_bytes)
        self._backend = model.backend(memory=memory, context=capacity)
        self.limits = self._backend.limits
        pages = np.arange(-(-capacity // self._backend.page_size))
        self._updates = TableUpdates(np.zeros_like(pages), pages, pages)  # for the first step
        self._tokens: list[int] = []
        self._states: dict[int, int] = {}  # state slots by the number of tokens they cover

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, tokens: Sequence[int]) -> Logits:
        """Append tokens and return the logits after the last one, [vocabulary]."""
        first = len(self._tokens)
        self._tokens += tokens
        states = empty_ints().reshape(0, 2)
        if self._backend.state_bytes:
            first, states = self._assign_slots(first)
        tokens = self._tokens[first:]
        count = len(tokens)
        positions = np.arange(first, first + count)
        batch = StepBatch(
            tokens=np.array(tokens, np.int64),
            positions=positions,
            visible_end=positions + 1,
            row_starts=np.array([0, count]),
            slots=np.array([0]),
            table_updates=self._updates,
            logits_indices=np.array([count - 1]),
            state_slots=states,
        )
        logits = self._backend.launch(batch).result().logits
        self._updates = TableUpdates()
        return logits[0]

    def _assign_slots(self, length: int) -> tuple[int, Ints]:
        """First position to compute, and the state slots to read and to write."""
        first = max((covered for covered in self._states if covered <= length), default=0)
        source = self._states.get(first, -1)
        in_use = set(self._states.values())
        available = [
            slot
            for slot in range(min(_MAX_STATES, self._backend.state_count))
            if slot not in in_use
        ]
        # Evict the oldest, but not the one that is read.
        oldest = min(self._states.keys() - {first}) if not available else 0
        target = available[0] if available else self._states.pop(oldest)
        self._states[len(self._tokens)] = target
        return first, np.array([[source, target]])

    def rewind(self, length: int) -> None:
        """Drop every token from position `length` on."""
        if not 0 <= length <= len(self._tokens):
            raise ValueError(f"cannot rewind {len(self._tokens)} tokens to {length}")
        del self._tokens[length:]
        self._states = {end: slot for end, slot in self._states.items() if end <= length}
