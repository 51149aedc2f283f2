"""A null backend whose logits are right only if every earlier token was computed correctly."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from helpers import canvas_support as support
from helpers import null_model
from unspool.backends.step import StepLimits, StepResult
from unspool.engine.canvas import CanvasKind
from unspool.engine.engine import Engine
from unspool.model.adapters import Adapter
from unspool.sampling.picker import pick_tokens

VOCAB = 40
MASK = 39
SIGHTS = [("causal", 0), ("whole", 0), ("block", 2), ("block", 4), ("block", 6), ("block", 8)]
FEW = StepLimits(max_rows=8, prefill_tokens=5, prefill_beside_decode=3)


class DeepNull(null_model.NullModel):
    """A null model of two layers: a page stores, for each token, what the token attended to when it
    was computed, and with which adapter. So logits depend on how every earlier token was computed.
    """

    def set_adapter(self, number: int, adapter: Any) -> None:
        pass

    def _compute(self, batch: Any) -> Any:
        if not hasattr(self, "attended"):
            self.attended = np.full(self.slots.shape, -1, np.int64)
        self.table.apply(batch.table_updates)
        self._copy_pages(batch.page_copies, self.slots, self.attended)
        rows = [
            (place, self.table.pages[batch.slots[row]], int(numbers))
            for row, numbers in enumerate(
                batch.adapters if len(batch.adapters) else batch.slots * 0
            )
            for place in range(batch.row_starts[row], batch.row_starts[row + 1])
        ]
        tokens = batch.tokens.copy()
        self._resolve_placeholders(tokens)
        for place, pages, _ in rows:
            self.slots[self._at(pages, int(batch.positions[place]))] = tokens[place]
        for place, pages, adapter in rows:
            past = [self.slots[self._at(pages, n)] for n in range(batch.visible_end[place])]
            self.attended[self._at(pages, int(batch.positions[place]))] = mixed(past, adapter)
        outputs = np.concatenate((batch.sample_indices, batch.logits_indices)).tolist()
        logits = np.zeros((len(outputs), self.vocab_size), np.float32)
        for number, place in enumerate(outputs):
            _, pages, adapter = rows[place]
            past = [self.attended[self._at(pages, n)] for n in range(batch.visible_end[place])]
            assert min(past) >= 0, "a token of the past was never computed"
            logits[number] = null_model.logits_after([mixed(past, adapter)], self.vocab_size)
        count = len(batch.sample_indices)
        if batch.sampling is None:
            return StepResult(np.empty(0, np.int64), np.empty(0), logits)
        picks = pick_tokens(logits[:count], batch.sampling)
        self._picked = picks.tokens
        return StepResult(picks.tokens, picks.logprobs, logits[count:], None, picks.failures)

    def _at(self, pages: Any, position: int) -> tuple[int, int]:
        return int(pages[position // self.page_size]), position % self.page_size


def mixed(numbers: list[int], adapter: int) -> int:
    """Return a hash of these numbers and the adapter."""
    return zlib.crc32(np.array([*numbers, adapter], np.int64).tobytes()) & 0x7FFFFFFF


def fresh(tokens: list[int], sees: Any, adapters: Any, position: int) -> Any:
    """Return the logits at a position when everything is computed from the start."""
    attended = [mixed(tokens[: sees[n]], adapters[n]) for n in range(len(tokens))]
    return null_model.logits_after([mixed(attended[: sees[position]], adapters[position])], VOCAB)


def engine_with(pages: int = 400, **options: Any) -> Engine:
    engine = Engine(DeepNull(pages=pages, vocab_size=VOCAB, limits=FEW, **options))
    engine.adapters.load("twin", Adapter({}))
    return engine


def expected_logits(text: list[int], places: list[int], kind: CanvasKind) -> Any:
    """Return the expected logits of each place."""
    tokens = [*text, *places]
    sees = support.ends(len(tokens), kind.sight, kind.block, len(text))
    twin = np.arange(len(tokens)) >= len(text) if kind.canvas_adapter else np.zeros(len(tokens))
    shifted = range(len(text) - kind.shifted, len(tokens) - kind.shifted)
    return np.array([fresh(tokens, sees, twin.astype(int), max(0, n)) for n in shifted])
