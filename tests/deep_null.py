"""A backend whose logits are right only if every token before was computed as it should be."""

from __future__ import annotations

import zlib
from typing import Any

import null_model
import numpy as np

import canvas_support as support
from unspool.backends.base import StepLimits
from unspool.backends.step import StepResult
from unspool.engine.canvas import CanvasKind
from unspool.engine.engine import Engine
from unspool.model.adapters import Adapter
from unspool.sampling.picker import pick

VOCAB = 40
MASK = 39
SIGHTS = [("causal", 0), ("whole", 0), ("block", 2), ("block", 4), ("block", 6), ("block", 8)]
FEW = StepLimits(max_rows=8, prefill_tokens=5, prefill_beside_decode=3)


class DeepNull(null_model.NullModel):
    """A null model of two layers: a page holds of each token what it saw when it was computed, and
    with which adapter. So logits are right only if every token before was computed as it should."""

    def set_adapter(self, number: int, adapter: Any) -> None:
        pass

    def _compute(self, batch: Any) -> Any:
        if not hasattr(self, "seen"):
            self.seen = np.full(self.slots.shape, -1, np.int64)
        self.table.apply(batch.updates)
        self._copy_pages(batch.copies, self.slots, self.seen)
        rows = [
            (place, self.table.pages[batch.slots[row]], int(numbers))
            for row, numbers in enumerate(
                batch.adapters if len(batch.adapters) else batch.slots * 0
            )
            for place in range(batch.starts[row], batch.starts[row + 1])
        ]
        for place, pages, _ in rows:
            self.slots[self._at(pages, int(batch.positions[place]))] = batch.tokens[place]
        for place, pages, adapter in rows:
            past = [self.slots[self._at(pages, n)] for n in range(batch.visible_end[place])]
            self.seen[self._at(pages, int(batch.positions[place]))] = mixed(past, adapter)
        wanted = np.concatenate((batch.sampled, batch.logits)).tolist()
        logits = np.zeros((len(wanted), self.vocab_size), np.float32)
        for number, place in enumerate(wanted):
            _, pages, adapter = rows[place]
            past = [self.seen[self._at(pages, n)] for n in range(batch.visible_end[place])]
            assert min(past) >= 0, "a token of the past was never computed"
            logits[number] = null_model.logits_after([mixed(past, adapter)], self.vocab_size)
        count = len(batch.sampled)
        if batch.pick is None:
            return StepResult(np.empty(0, np.int64), np.empty(0), logits)
        found = pick(logits[:count], batch.pick)
        return StepResult(found.tokens, found.logprobs, logits[count:], None, found.failures)

    def _at(self, pages: Any, position: int) -> tuple[int, int]:
        return int(pages[position // self.page_size]), position % self.page_size


def mixed(numbers: list[int], adapter: int) -> int:
    """A number that tells whether any of these is another."""
    return zlib.crc32(np.array([*numbers, adapter], np.int64).tobytes()) & 0x7FFFFFFF


def fresh(tokens: list[int], sees: Any, adapters: Any, position: int) -> Any:
    """What the model says at a position when everything is computed from the beginning."""
    seen = [mixed(tokens[: sees[n]], adapters[n]) for n in range(len(tokens))]
    return null_model.logits_after([mixed(seen[: sees[position]], adapters[position])], VOCAB)


def engine_with(pages: int = 400, **options: Any) -> Engine:
    engine = Engine(DeepNull(pages=pages, vocab_size=VOCAB, limits=FEW, **options))
    engine.adapters.load("twin", Adapter({}))
    return engine


def said(text: list[int], places: list[int], kind: CanvasKind) -> Any:
    """What is to be said of each place."""
    tokens = [*text, *places]
    sees = support.ends(len(tokens), kind.sight, kind.block, len(text))
    twin = np.arange(len(tokens)) >= len(text) if kind.twin else np.zeros(len(tokens))
    shifted = range(len(text) - kind.shifted, len(tokens) - kind.shifted)
    return np.array([fresh(tokens, sees, twin.astype(int), max(0, n)) for n in shifted])
