"""One text on a backend of its own, without an engine: append tokens, get logits, take them back.

For who runs where an engine's thread must not be waited for, such as a drafter, which runs on the
engine's own thread. The text has all pages of its backend, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unspool.backends.base import Loaded
from unspool.backends.step import Logits, StepBatch, TableUpdates

_LARGEST_PAGE = 256  # tokens: room for one that is not filled


class OneText:
    """A text the model is reading, at most `capacity` tokens long."""

    def __init__(self, model: Loaded, capacity: int) -> None:
        config = model.config
        config.check_left_to_right()
        # 32 bits a number are the widest that a backend keeps; untouched pages cost nothing.
        widest = config.kv_numbers * 4
        memory = (capacity + _LARGEST_PAGE) * widest
        self._backend = model.backend(memory=memory, context=capacity)
        self.limits = self._backend.limits
        pages = np.arange(-(-capacity // self._backend.page_size))
        self._updates = TableUpdates(np.zeros_like(pages), pages, pages)  # for the first step
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, tokens: Sequence[int]) -> Logits:
        """What the model says comes after these tokens: one logit for each of its vocabulary."""
        count = len(tokens)
        positions = np.arange(self._length, self._length + count)
        batch = StepBatch(
            tokens=np.array(tokens, np.int64),
            positions=positions,
            visible_end=positions + 1,
            starts=np.array([0, count]),
            slots=np.array([0]),
            updates=self._updates,
            logits=np.array([count - 1]),
        )
        logits = self._backend.launch(batch).result().logits
        self._updates = TableUpdates()
        self._length += count
        return logits[0]

    def rewind(self, length: int) -> None:
        """Drop every token from position `length` on; what lies behind is overwritten."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot rewind {self._length} tokens to {length}")
        self._length = length
