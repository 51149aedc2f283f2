"""A backend without a model: its logits are a pure function of the tokens that lie in the pages.

If the engine ever gave a branch a wrong or overwritten page, the logits would come out different
from `logits_after(tokens)`, so texts written on it prove that the pages are right. It also costs
almost nothing, which shows what the engine itself costs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from unspool.backends.base import Batch, Ran, Taps

PAGE_SIZE = 4


def logits_after(tokens: Sequence[int], vocab_size: int) -> np.ndarray[Any, Any]:
    """What the null model says comes after these tokens."""
    seed = zlib.crc32(np.asarray(tokens, np.int32).tobytes())
    return np.random.default_rng(seed).standard_normal(vocab_size).astype(np.float32) * 3


class NullModel:
    def __init__(
        self, pages: int = 64, vocab_size: int = 40, context: int = 512, page_size: int = PAGE_SIZE
    ) -> None:
        self.page_size, self.page_count, self.page_bytes = page_size, pages, 1
        self.vocab_size, self.context = vocab_size, context
        self.slots = np.full((pages, page_size), -1, np.int64)
        self.runs: list[list[int]] = []  # how many tokens each row of each run brought
        self.fail_next = False

    def copy_page(self, source: int, target: int) -> None:
        self.slots[target] = self.slots[source]

    def run(self, batch: Batch, taps: Taps | None = None) -> Ran:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is gone")
        self.runs.append(np.diff(batch.starts).tolist())
        wanted = {int(token): row for row, token in enumerate(batch.wanted)}
        logits = np.zeros((len(wanted), self.vocab_size), np.float32)
        for row in range(len(batch.starts) - 1):
            pages = batch.pages[row]
            for place in range(batch.starts[row], batch.starts[row + 1]):
                position = int(batch.positions[place])
                page = pages[position // self.page_size]
                assert page >= 0, "a position without a page"
                self.slots[page, position % self.page_size] = batch.tokens[place]
                if place in wanted:
                    used = pages[: position // self.page_size + 1]
                    past = self.slots[used].reshape(-1)[: position + 1]
                    assert (past >= 0).all(), "a token of the past was never written"
                    logits[wanted[place]] = logits_after(past, self.vocab_size)
        return Ran(logits)
