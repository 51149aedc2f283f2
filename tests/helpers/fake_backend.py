"""A backend without a model: the logits are those of a table, chosen by the last two tokens.

The pages hold the tokens themselves, and the token before is read from there: an engine that
mixes up pages, positions or rewinds gets other logits, not just a slower run.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from unspool.backends.step import BlockTable, CompletedStep, StepBatch, StepLimits, StepResult
from unspool.sampling.picker import pick_tokens


class FakeBackend:
    """`probabilities[a, b]` is the distribution of what follows the tokens a, b."""

    page_size = 4
    page_bytes = 32
    limits = StepLimits()
    overlaps = False
    echoes = True
    sites = frozenset()
    state_bytes = state_count = 0

    def __init__(self, probabilities: Any, *, page_count: int = 512, context: int = 64) -> None:
        with np.errstate(divide="ignore"):
            self.logits = np.log(np.asarray(probabilities, np.float64)).astype(np.float32)
        self.vocab_size = self.logits.shape[-1]
        self.page_count, self.context = page_count, context
        self.stored = np.full((page_count, self.page_size), -1, np.int64)
        self.table = BlockTable()
        self.runs: list[int] = []  # tokens read in each

    def set_adapter(self, number: int, adapter: Any) -> None:
        raise NotImplementedError

    def launch(self, batch: StepBatch) -> CompletedStep:
        self.table.apply(batch.table_updates)
        self.stored[batch.page_copies[:, 1]] = self.stored[
            batch.page_copies[:, 0]
        ]  # reads before it writes
        size, places = self.page_size, batch.positions
        rows = np.repeat(batch.slots, np.diff(batch.row_starts))
        self.stored[self.table.pages[rows, places // size], places % size] = batch.tokens
        for token, line in batch.echoes.tolist():
            place = int(places[token])
            self.stored[self.table.pages[line, place // size], place % size] = batch.tokens[token]
        before = np.maximum(places - 1, 0)
        previous = self.stored[self.table.pages[rows, before // size], before % size]
        assert (previous >= 0).all(), "a page was read that nobody had written"
        self.runs.append(len(batch.tokens))
        logits = self.logits[previous, batch.tokens]
        returned = logits[batch.logits_indices]
        if batch.sampling is None:
            return CompletedStep(StepResult(np.empty(0, np.int64), np.empty(0), returned))
        picks = pick_tokens(np.ascontiguousarray(logits[batch.sample_indices]), batch.sampling)
        return CompletedStep(
            StepResult(picks.tokens, picks.logprobs, returned, None, picks.failures)
        )
