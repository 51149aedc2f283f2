"""One text on a backend of its own, without an engine: append tokens, get logits, take them back.

For who runs where an engine's thread must not be waited for, such as a drafter, which runs on the
engine's own thread. The text has all pages of its backend, in their order. Of a model with
recurrent layers the states behind the last appended parts are kept; taken back to elsewhere, the
text is read again from the last of them on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unspool.backends.base import Loaded
from unspool.backends.step import Ints, Logits, StepBatch, TableUpdates, no_ints

_LARGEST_PAGE = 256  # tokens: room for one that is not filled
_STATES = 32  # kept: more than a drafter guesses at once


class OneText:
    """A text the model is reading, at most `capacity` tokens long."""

    def __init__(self, model: Loaded, capacity: int) -> None:
        config = model.config
        config.check_left_to_right()
        # 32 bits a number are the widest that a backend keeps; untouched pages cost nothing.
        widest = config.kv_numbers * 4
        memory = (capacity + _LARGEST_PAGE) * widest
        if config.state_bytes:  # half of it is theirs
            memory = 2 * max(memory, _STATES * config.state_bytes)
        self._backend = model.backend(memory=memory, context=capacity)
        self.limits = self._backend.limits
        pages = np.arange(-(-capacity // self._backend.page_size))
        self._updates = TableUpdates(np.zeros_like(pages), pages, pages)  # for the first step
        self._tokens: list[int] = []
        self._states: dict[int, int] = {}  # slots by the length of the text that their states read

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, tokens: Sequence[int]) -> Logits:
        """What the model says comes after these tokens: one logit for each of its vocabulary."""
        first = len(self._tokens)
        self._tokens += tokens
        states = no_ints().reshape(0, 2)
        if self._backend.state_bytes:
            first, states = self._slots(first)
        tokens = self._tokens[first:]
        count = len(tokens)
        positions = np.arange(first, first + count)
        batch = StepBatch(
            tokens=np.array(tokens, np.int64),
            positions=positions,
            visible_end=positions + 1,
            starts=np.array([0, count]),
            slots=np.array([0]),
            updates=self._updates,
            logits=np.array([count - 1]),
            states=states,
        )
        logits = self._backend.launch(batch).result().logits
        self._updates = TableUpdates()
        return logits[0]

    def _slots(self, length: int) -> tuple[int, Ints]:
        """From where on the text is read, and the slots that are read and written."""
        first = max((place for place in self._states if place <= length), default=0)
        source = self._states.get(first, -1)
        taken = set(self._states.values())
        spare = [
            slot for slot in range(min(_STATES, self._backend.state_count)) if slot not in taken
        ]
        # The oldest makes room, but not the one that is read.
        target = spare[0] if spare else self._states.pop(min(self._states.keys() - {first}))
        self._states[len(self._tokens)] = target
        return first, np.array([[source, target]])

    def rewind(self, length: int) -> None:
        """Drop every token from position `length` on; what lies behind is overwritten."""
        if not 0 <= length <= len(self._tokens):
            raise ValueError(f"cannot rewind {len(self._tokens)} tokens to {length}")
        del self._tokens[length:]
        self._states = {at: slot for at, slot in self._states.items() if at <= length}
