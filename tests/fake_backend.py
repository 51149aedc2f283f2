"""A backend without a model: the logits are those of a table, chosen by the last two tokens.

The pages hold the tokens themselves, and the token before is read from there: whoever mixes up
pages, positions or rewinds gets other logits, not just a slower run.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from unspool.backends.base import Batch, Ran, Taps


class FakeBackend:
    """`probabilities[a, b]` is the distribution of what follows the tokens a, b."""

    page_size = 4
    page_bytes = 32

    def __init__(self, probabilities: Any, *, page_count: int = 512, context: int = 64) -> None:
        with np.errstate(divide="ignore"):
            self.logits = np.log(np.asarray(probabilities, np.float64)).astype(np.float32)
        self.vocab_size = self.logits.shape[-1]
        self.page_count, self.context = page_count, context
        self.stored = np.full(page_count * self.page_size, -1, np.int64)
        self.runs: list[int] = []  # tokens read in each

    def run(self, batch: Batch, taps: Taps | None = None) -> Ran:
        size = self.page_size
        rows = np.repeat(np.arange(len(batch.starts) - 1), np.diff(batch.starts))
        places = batch.positions
        slots = batch.pages[rows, places // size] * size + places % size
        self.stored[slots] = batch.tokens
        before = np.maximum(places - 1, 0)
        previous = self.stored[batch.pages[rows, before // size] * size + before % size]
        assert (previous >= 0).all(), "a page was read that nobody had written"
        self.runs.append(len(batch.tokens))
        return Ran(self.logits[previous, batch.tokens][batch.wanted])

    def copy_page(self, source: int, target: int) -> None:
        size = self.page_size
        self.stored[target * size : (target + 1) * size] = self.stored[
            source * size : (source + 1) * size
        ]
