"""A backend without a model: its logits are a pure function of the tokens in the pages.

If the engine ever gave a branch a wrong or overwritten page, the logits would come out different
from `logits_after(tokens)`, so texts written on it prove that the pages are right. It also costs
almost nothing, which shows what the engine itself costs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unspool.backends.interventions import OUTPUT_SITES, StepInterventions, value_digest
from unspool.backends.step import (
    BlockTable,
    Ints,
    Observations,
    StepBatch,
    StepLimits,
    StepResult,
    empty_ints,
)
from unspool.sampling.picker import pick_tokens

PAGE_SIZE = 4


def logits_after(tokens: Sequence[int], vocab_size: int) -> np.ndarray[Any, Any]:
    """Return the null model's logits after these tokens."""
    seed = zlib.crc32(np.asarray(tokens, np.int32).tobytes())
    return np.random.default_rng(seed).standard_normal(vocab_size).astype(np.float32) * 3


def marks_of(steered: StepInterventions | None, count: int) -> Ints:
    """What interventions add to the tokens that they touch: a number by content and order."""
    marks = np.zeros(count, np.int64)
    if steered is not None:
        starts, numbers, offsets = steered.by_token(count)
        for token in range(count):
            for n in range(starts[token], starts[token + 1]):
                intervention = steered.table[numbers[n]]
                if intervention.site in OUTPUT_SITES:
                    continue  # changes no keys and values
                at = offsets[n] if intervention.num_tokens else 0
                content = f"{value_digest(intervention)} {at}".encode()
                marks[token] = (marks[token] * 7 + zlib.crc32(content)) % 9973
    return marks * 1000


class NullModel:
    """With `overlaps`, a step is computed when its result is read, after the next one was
    launched, as on a device."""

    def __init__(
        self,
        pages: int = 64,
        vocab_size: int = 40,
        context: int = 512,
        page_size: int = PAGE_SIZE,
        overlaps: bool = False,
        echoes: bool = True,
        sites: frozenset[str] = frozenset(),
        limits: StepLimits = StepLimits(),  # noqa: B008
    ) -> None:
        self.limits = limits
        self.page_size, self.page_count, self.page_bytes = page_size, pages, 1
        self.vocab_size, self.context, self.overlaps = vocab_size, context, overlaps
        self.echoes, self.state_bytes, self.state_count = echoes, 0, 0
        self.sites = sites
        self.slots = np.full((pages, page_size), -1, np.int64)
        self.table = BlockTable()
        self.runs: list[list[int]] = []  # how many tokens each row of each step brought
        self.batches: list[StepBatch] = []
        self.has_placeholder = 0  # tokens that were not known when their step was launched
        self.fail_next = False
        self._queue: list[_Later] = []
        self._picked = empty_ints()  # in the step before

    def set_adapter(self, number: int, adapter: Any) -> None:
        raise NotImplementedError

    def launch(self, batch: StepBatch) -> _Later:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is gone")
        self.runs.append(np.diff(batch.row_starts).tolist())
        later = _Later(lambda: self._compute(batch), self._queue)
        self._queue.append(later)
        if not self.overlaps:
            later.result()
        return later

    def _compute(self, batch: StepBatch) -> StepResult:
        self.table.apply(batch.table_updates)
        self._copy_pages(batch.page_copies, self.slots)
        tokens = batch.tokens.copy()
        self.has_placeholder += int((tokens < 0).sum())
        self._resolve_placeholders(tokens)
        tokens += marks_of(batch.interventions, len(tokens))
        outputs = np.concatenate((batch.sample_indices, batch.logits_indices)).tolist()
        place_of = {token: row for row, token in enumerate(outputs)}
        logits = np.zeros((len(outputs), self.vocab_size), np.float32)
        rows = range(len(batch.row_starts) - 1)
        for row in rows:
            for place in range(batch.row_starts[row], batch.row_starts[row + 1]):
                page, slot = self._place(batch, row, int(batch.positions[place]))
                self.slots[page, slot] = tokens[place]
        for place, line in batch.echoes.tolist():
            column, slot = divmod(int(batch.positions[place]), self.page_size)
            self.slots[self.table.pages[line, column], slot] = tokens[place]
        inside = self._inside(batch, tokens) if batch.observe else None
        for row in rows:
            for place in range(batch.row_starts[row], batch.row_starts[row + 1]):
                if place in place_of:
                    end = int(batch.visible_end[place])
                    at = [self._place(batch, row, position) for position in range(end)]
                    past = np.array([self.slots[page, slot] for page, slot in at])
                    assert (past >= 0).all(), "a token of the past was never written"
                    logits[place_of[place]] = logits_after(past, self.vocab_size)
        count = len(batch.sample_indices)
        if batch.sampling is None:
            return StepResult(np.empty(0, np.int64), np.empty(0), logits, inside)
        self._resolve_placeholders(batch.sampling.history)
        picks = pick_tokens(logits[:count], batch.sampling)
        self._picked = picks.tokens
        return StepResult(picks.tokens, picks.logprobs, logits[count:], inside, picks.failures)

    def _copy_pages(self, copies: Ints, *stores: np.ndarray[Any, Any]) -> None:
        """Copy pages as a GPU may: read every source, then write every target."""
        sources, targets = copies[:, 0].tolist(), copies[:, 1].tolist()
        assert not set(sources) & set(targets), "a copy reads what another one writes"
        assert len(set(targets)) == len(targets), "two copies write the same page"
        for store in stores:
            store[copies[:, 1]] = store[copies[:, 0]]

    def _inside(self, batch: StepBatch, tokens: Ints) -> Observations:
        """Return vectors of (layer, position, token)."""
        look = batch.observe
        assert look is not None
        layers = range(3) if look.layers is None else look.layers
        observed = look.residuals
        vectors = [[(n, batch.positions[t], tokens[t]) for t in observed.tolist()] for n in layers]
        return Observations(np.array(vectors, np.float32))

    def _resolve_placeholders(self, tokens: Ints) -> None:
        """Replace placeholders by the tokens picked in the step before."""
        tokens[tokens < 0] = np.maximum(0, self._picked[-1 - tokens[tokens < 0]])

    def _place(self, batch: StepBatch, row: int, position: int) -> tuple[int, int]:
        page = int(self.table.pages[batch.slots[row], position // self.page_size])
        assert page >= 0, "a position without a page"
        return page, position % self.page_size


class _Later:
    """A step that is computed when its result is read, after those launched before it."""

    def __init__(self, compute: Callable[[], StepResult], queue: list[_Later]) -> None:
        self._compute, self._queue = compute, queue
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        while self._result is None:
            first = self._queue.pop(0)
            first._result = first._compute()
        return self._result

    def ready(self) -> bool:
        return self._result is not None
