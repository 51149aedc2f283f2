"""The null model with a recurrent state: a number that every token changes.

Its logits follow from the pages, as the null model's do, and it is stricter: the state that a row
is given must be the one that its pages say, so a state of another text or position, or one
that was never written fails the step. It also checks the contract of `StepBatch.states`.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from helpers.null_model import NullModel
from unspool.backends.step import StepBatch, StepResult


def after(state: int, token: int) -> int:
    """Return the state after one more token."""
    return zlib.crc32(b"%d %d" % (state, token))


class RecurrentNull(NullModel):
    """Each of `states` slots holds a number, and how many tokens it has read."""

    def __init__(self, states: int = 32, state_bytes: int = 1000, **shape: Any) -> None:
        super().__init__(echoes=False, **shape)
        self.state_bytes, self.state_count = state_bytes, states
        self.slot_states: dict[int, tuple[int, int]] = {}  # slot: number, length
        self.captured = 0

    def _compute(self, batch: StepBatch) -> StepResult:
        self._check(batch)
        tokens = batch.tokens.copy()
        self._resolve_placeholders(tokens)
        captures = {int(token): int(slot) for token, slot in batch.state_captures}
        self.captured += len(captures)
        written: dict[int, tuple[int, int]] = {}
        for row, (source, target) in enumerate(batch.state_slots.tolist()):
            begin, end = int(batch.row_starts[row]), int(batch.row_starts[row + 1])
            first = int(batch.positions[begin])
            state, length = (0, 0) if source < 0 else self.slot_states[source]
            assert length == first, f"the state has read {length} tokens, and not {first}"
            for place in range(begin, end):
                state = after(state, int(tokens[place]))
                if place in captures:
                    written[captures[place]] = state, first + place - begin + 1
            written[target] = state, first + end - begin
        self.slot_states.update(written)
        result = super()._compute(batch)
        for row, (_, target) in enumerate(batch.state_slots.tolist()):
            self._compare(batch, row, *self.slot_states[target])
        return result

    def _check(self, batch: StepBatch) -> None:
        rows = len(batch.row_starts) - 1
        assert batch.state_slots.shape == (rows, 2), "every row has its states"
        reads = batch.state_slots[:, 0].tolist()
        writes = [*batch.state_slots[:, 1].tolist(), *batch.state_captures[:, 1].tolist()]
        assert len(set(writes)) == len(writes), "a slot is written once"
        for row, (source, target) in enumerate(batch.state_slots.tolist()):
            assert source in self.slot_states or source == -1, "nobody has written this slot"
            others = reads[:row] + reads[row + 1 :]
            assert target not in others, "nobody reads what another row writes"
        assert not set(reads) & set(batch.state_captures[:, 1].tolist()), (
            "nor what is kept on the way"
        )
        assert all(0 <= slot < self.state_count for slot in writes)
        places = batch.state_captures[:, 0].tolist()
        assert places == sorted(set(places)) and all(0 <= p < len(batch.tokens) for p in places)

    def _compare(self, batch: StepBatch, row: int, state: int, length: int) -> None:
        """A state must be what the tokens in the row's pages make; of long texts now and then."""
        if length > 200 and length % 16:
            return
        expected = 0
        for position in range(length):
            page, place = self._place(batch, row, position)
            expected = after(expected, int(self.slots[page, place]))
        assert state == expected, "the state is not that of this text"


def spread(text: list[int], count: int) -> list[int]:
    """Tokens that follow from a text, but are not what comes next: for drafts that err."""
    seed = zlib.crc32(np.asarray(text, np.int32).tobytes())
    return np.random.default_rng(seed).integers(0, 40, count).tolist()
