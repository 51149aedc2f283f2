"""The candidates that remain at one step, for every row of a batch.

A row begins as the whole vocabulary, one column a token. A stage that truncates leaves a few: from
then on the columns are only those, with their token ids beside them, in float64, and every later
stage is cheap. A removed candidate has the logit -inf; padding looks the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.sampling.arrays import LOWEST, Array, operations
from unspool.sampling.faults import BadLogitsError, NoCandidateError

SLACK = 1e-6
"""A mass or probability this close (relatively) to its limit counts as reaching it: logits in
float32 know no better, and 0.4 + 0.3 reaches 0.7."""

INF = float("inf")


@dataclass(frozen=True, slots=True)
class Measure:
    """Of each row's distribution, [rows, 1] in float64 each: what a softmax needs."""

    peak: Array  # the largest logit
    total: Array  # Σ exp(logit - peak)
    entropy: Array | None  # in nats
    weights: Array | None  # exp(logit - peak) [rows, K], where only a few candidates remain


class Candidates:
    """Logits [rows, K] of the remaining candidates and, unless K is the vocabulary, their ids."""

    __slots__ = ("_measure", "_peak", "by_id", "ids", "logits", "ops", "ordered", "vocabulary")

    def __init__(
        self,
        logits: Array,
        ids: Array | None = None,
        *,
        vocabulary: int = 0,
        ordered: bool = False,
        by_id: bool = False,
    ) -> None:
        self.ops = operations(logits)
        self.logits = logits
        self.ids = ids
        self.vocabulary = vocabulary or logits.shape[-1]
        self.ordered = ordered  # likeliest first, equals by lower id, removed last
        self.by_id = by_id or ids is None  # columns ascend by token id, so equals stand in order
        self._peak: Array | None = None
        self._measure: Measure | None = None

    @property
    def rows(self) -> int:
        return int(self.logits.shape[0])

    # -- what the distribution is -------------------------------------------------------------

    def peak(self) -> Array:
        """The largest logit of each row; +inf is made finite, none left at all is an error."""
        if self._peak is not None:
            return self._peak
        peak = self.logits[:, :1] if self.ordered else self.ops.amax(self.logits)
        peak = self.ops.double(peak)
        known = self.ops.host(peak)[:, 0]
        if not np.isfinite(known).all():
            self._refuse(known)
            # Infinitely likely: those alone remain, as equals.
            sure, row = self.logits == INF, peak == INF
            self.logits = self.ops.where(row & sure, 0.0, self.logits)
            self.logits = self.ops.where(row & ~sure, -INF, self.logits)
            peak = self.ops.where(row, 0.0, peak)
        self._peak = peak
        return peak

    def _refuse(self, peaks: np.ndarray[Any, Any]) -> None:
        bad = np.flatnonzero(np.isnan(peaks))
        if bad.size:
            raise BadLogitsError("the model gave NaN logits", bad.tolist())
        empty = np.flatnonzero(peaks == -INF)
        if empty.size:
            raise NoCandidateError("every token is forbidden", empty.tolist())

    def measure(self, entropy: bool = False) -> Measure:
        """Peak, total and (where asked) entropy; computed once."""
        known = self._measure
        if known is not None and (known.entropy is not None or not entropy):
            return known
        peak = self.peak()
        if self.ids is None:
            total, spread = self.ops.measure(self.logits, peak, entropy)
            self._measure = Measure(peak, total, spread, None)
        else:
            below = self.ops.at_least(self.logits - peak, LOWEST)
            weights = self.ops.exp(below)
            total = weights.cumsum(-1)[:, -1:]
            spread = None
            if entropy:
                spread = self.ops.log(total) - (weights * below).cumsum(-1)[:, -1:] / total
            self._measure = Measure(peak, total, spread, weights)
        return self._measure

    def remaining(self) -> Array:
        """How many candidates each row still has; [rows]."""
        return self.ops.count(self.logits > -INF)

    # -- fewer of them ------------------------------------------------------------------------

    def lead(self, count: int) -> Candidates:
        """The `count` likeliest of each row, likeliest first."""
        if self.ordered:
            return self._cut(count)
        if not self.by_id:
            return self.in_order()._cut(count)
        values, columns = self.ops.leading(self.logits, count)
        return self._chosen(values, columns, ordered=True)

    def in_order(self) -> Candidates:
        """All of them, likeliest first, equals by lower id."""
        if self.ordered:
            return self
        if self.by_id:
            return self.lead(self.logits.shape[-1])
        by_id = self.ops.ascending(self.ids)
        logits = self.ops.take(self.logits, by_id)
        order = self.ops.ascending(-logits)
        ids = self.ops.take(self.ops.take(self.ids, by_id), order)
        return self._like(self.ops.take(logits, order), ids, ordered=True)

    def above(self, bound: Array) -> Candidates:
        """Those whose logit reaches the row's bound; the likeliest of each row always."""
        bound = self.ops.minimum(bound - SLACK, self.peak())
        if self.ids is not None and self.logits.shape[-1] <= 256:
            kept = self.logits >= bound
            return self.with_logits(self.ops.where(kept, self.logits, -INF), self.ordered)
        values, columns = self.ops.above(self.logits, bound)
        return self._chosen(values, columns, ordered=self.ordered)

    def first(self, kept: Array) -> Candidates:
        """Of candidates in order, the first kept[row] (at least one)."""
        kept = self.ops.at_least(kept, 1)
        wide = self.logits.shape[-1] > 256
        few = self._cut(int(kept.max())) if wide else self
        inside = self.ops.columns(few.logits) < kept[:, None]
        return few.with_logits(self.ops.where(inside, few.logits, -INF), ordered=True)

    def chosen(self, columns: Array, kept: Array) -> Candidates:
        """The given columns [rows, n] where kept [rows, n], in no particular order."""
        logits = self.ops.where(kept, self.ops.take(self.logits, columns), -INF)
        result = self._chosen(logits, columns, ordered=False)
        result.by_id = False
        return result

    # -- the same ones, with other logits ------------------------------------------------------

    def with_logits(self, logits: Array, ordered: bool = False) -> Candidates:
        return self._like(logits, self.ids, ordered=ordered, by_id=self.by_id)

    def revise(
        self,
        rows: np.ndarray[Any, Any],
        tokens: np.ndarray[Any, Any],
        amounts: tuple[np.ndarray[Any, Any], ...],
        change: Callable[..., Array],
    ) -> Candidates:
        """New logits for single tokens: change(logits, *amounts), all flat and aligned.

        No (row, token) may occur twice, and tokens must be in the vocabulary; those no longer
        candidates are passed over.
        """
        if self.ids is not None:
            rows, tokens, amounts = self._located(rows, tokens, amounts)
        if not rows.size:
            return self
        logits = self.ops.copy(self.logits)
        place = (self.ops.like(rows, logits), self.ops.like(tokens, logits))
        logits[place] = change(logits[place], *(self.ops.like(a, logits) for a in amounts))
        return self.with_logits(logits)

    def _located(
        self,
        rows: np.ndarray[Any, Any],
        tokens: np.ndarray[Any, Any],
        amounts: tuple[np.ndarray[Any, Any], ...],
    ) -> tuple[Any, Any, tuple[Any, ...]]:
        """Of (row, token) pairs those that are candidates, as (row, column) pairs."""
        if not rows.size:
            return rows, tokens, amounts
        keys = rows * self.vocabulary + tokens
        order = np.argsort(keys)
        keys = keys[order]
        ids = self.ops.host(self.ids) + np.arange(self.rows)[:, None] * self.vocabulary
        spot = np.minimum(np.searchsorted(keys, ids), keys.size - 1)
        hit = (keys[spot] == ids) & (self.ops.host(self.logits) > -INF)
        row, column = np.nonzero(hit)
        which = order[spot[row, column]]
        return row, column, tuple(amount[which] for amount in amounts)

    # -- the ways to make one from another ------------------------------------------------------

    def _cut(self, count: int) -> Candidates:
        if self.ids is None or count >= self.logits.shape[-1]:
            return self
        return self._like(self.logits[:, :count], self.ids[:, :count], ordered=True)

    def _chosen(self, values: Array, columns: Array, ordered: bool) -> Candidates:
        ids = columns if self.ids is None else self.ops.take(self.ids, columns)
        # float64 from here on, always: a row's numbers must not depend on its neighbours' width.
        values = self.ops.double(values)
        return self._like(values, ids, ordered=ordered, by_id=self.by_id and not ordered)

    def _like(
        self, logits: Array, ids: Array | None, *, ordered: bool = False, by_id: bool = False
    ) -> Candidates:
        return Candidates(logits, ids, vocabulary=self.vocabulary, ordered=ordered, by_id=by_id)
