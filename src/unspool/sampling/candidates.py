"""The candidates that remain at one step, for every row of a batch.

A row begins as the whole vocabulary, one column a token. A stage that truncates leaves a few: from
then on the columns are only those, with their token ids beside them, in float64, and every later
stage is cheap. A removed candidate has the logit -inf; padding looks the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from unspool.sampling.arrays import LOWEST, Array
from unspool.sampling.faults import BadLogitsError, NoCandidateError
from unspool.sampling.operations import Operations, operations

SLACK = 1e-6
"""A mass or probability this close (relatively) to its limit counts as reaching it: logits in
float32 know no better, and 0.4 + 0.3 reaches 0.7."""

INF = float("inf")


class Measure(NamedTuple):
    """Of each row's distribution, [rows, 1] in float64 each: what a softmax needs."""

    peak: Array  # the largest logit
    total: Array  # Σ exp(logit - peak)
    entropy: Array | None  # in nats
    weights: Array | None = None  # exp(logit - peak) [rows, K], where only a few remain
    running: Array | None = None  # their sums from left to right [rows, K]


class Candidates:
    """Logits [rows, K] of the remaining candidates and, unless K is the vocabulary, their ids."""

    __slots__ = (
        "_lead", "_measure", "_peak", "_remaining", "by_id", "ids", "logits", "ops", "ordered",
        "passing", "vocabulary",
    )  # fmt: skip

    def __init__(
        self,
        logits: Array,
        ids: Array | None = None,
        *,
        vocabulary: int = 0,
        ordered: bool = False,
        by_id: bool = False,
        peak: Array | None = None,
        ops: Operations | None = None,
    ) -> None:
        self.ops = ops or operations(logits)
        self.logits = logits
        self.ids = ids
        self.vocabulary = vocabulary or logits.shape[-1]
        self.ordered = ordered  # likeliest first, equals by lower id, removed last
        self.by_id = by_id or ids is None  # columns ascend by token id, so equals stand in order
        self.passing = False  # the logits are a copy that nobody will look at once revised again
        self._peak = peak
        self._measure: Measure | None = None
        self._remaining: Array | None = None
        self._lead: Candidates | None = None

    @property
    def rows(self) -> int:
        return int(self.logits.shape[0])

    # -- what the distribution is -------------------------------------------------------------

    def peak(self) -> Array:
        """The largest logit of each row; +inf is made finite, none left at all is an error."""
        if self._peak is not None:
            return self._peak
        peak = self.logits[:, :1] if self.ordered else self.ops.amax(self.logits)
        return self._checked(self.ops.double(peak))

    def _checked(self, peak: Array) -> Array:
        known = self.ops.host(peak)[:, 0]
        if not all(map(math.isfinite, known.tolist())):
            self._refuse(known)
            # Infinitely likely: those alone remain, as equals.
            sure, row = self.logits == INF, peak == INF
            self.logits = self.ops.where(row & sure, 0.0, self.logits)
            self.logits = self.ops.where(row & ~sure, -INF, self.logits)
            peak = self.ops.where(row, 0.0, peak)
            self._lead = None
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
        if self.ids is not None:
            self._measure = self._measure_few(entropy)
            return self._measure
        peak, total, spread = self.ops.measure(self.logits, self._peak, entropy)
        if self._peak is None and self._checked(peak) is not peak:  # the logits had to be mended
            peak, total, spread = self.ops.measure(self.logits, self._peak, entropy)
        self._measure = Measure(peak, total, spread)
        return self._measure

    def _measure_few(self, entropy: bool) -> Measure:
        peak = self.peak()
        below = self.logits - peak
        weights = self.ops.exp(below)
        running = weights.cumsum(-1)
        total, spread = running[:, -1:], None
        if entropy:  # 0 times -inf is to be 0
            moment = (weights * self.ops.at_least(below, LOWEST)).cumsum(-1)[:, -1:]
            spread = self.ops.log(total) - moment / total
        return Measure(peak, total, spread, weights, running)

    def remaining(self) -> Array:
        """How many candidates each row still has; [rows]."""
        if self._remaining is None:
            self._remaining = self.ops.count(self.logits > -INF)
        return self._remaining

    # -- fewer of them ------------------------------------------------------------------------

    def lead(self, count: int) -> Candidates:
        """The `count` likeliest of each row, likeliest first."""
        if self.ordered:
            return self._cut(count)
        if not self.by_id:
            return self.in_order()._cut(count)
        if self._lead is None or self._lead.logits.shape[-1] < count:
            values, columns = self.ops.leading(self.logits, count)
            self._lead = self._chosen(values, columns, ordered=True, peak=self._peak)
        return self._lead._cut(count)

    def line(self, count: int) -> tuple[Candidates, Array, Array]:
        """The `count` likeliest, their exp(logit - peak), and the sums of these from the left."""
        few, whole = self.lead(count), self.measure()
        if whole.weights is not None and whole.running is not None and self.ordered:
            return few, whole.weights[:, :count], whole.running[:, :count]
        weights = self.ops.exp(few.logits - whole.peak)
        return few, weights, weights.cumsum(-1)

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
        if self.ordered:
            return self.first(self.ops.count(self.logits >= bound))
        if self.ids is not None and self.logits.shape[-1] <= 256:
            kept = self.logits >= bound
            return self.with_logits(self.ops.where(kept, self.logits, -INF))
        values, columns = self.ops.above(self.logits, bound)
        return self._chosen(values, columns, ordered=False, peak=self._peak)

    def first(self, kept: Array) -> Candidates:
        """Of candidates in order, the first kept[row] (at least one)."""
        if self.rows == 1:
            return self._cut(max(1, int(kept[0])))
        few = self._cut(max(1, int(kept.max())))
        inside = self.ops.columns(few.logits) < self.ops.at_least(kept, 1)[:, None]
        logits = self.ops.where(inside, few.logits, -INF)
        return self._like(logits, few.ids, ordered=True, peak=few._peak)

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
        logits = self.logits if self.passing else self.ops.copy(self.logits)
        by = [self.ops.like(amount, logits) for amount in amounts]
        place = self.ops.like(tokens, logits)
        if self.rows == 1:  # the same, in half the time
            line = logits[0]
            line[place] = change(line[place], *by)
        else:
            places = (self.ops.like(rows, logits), place)
            logits[places] = change(logits[places], *by)
        revised = self.with_logits(logits)
        revised.passing = True
        return revised

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
        few = self.logits[:, :count], self.ids[:, :count]
        return self._like(*few, ordered=True, peak=self._peak)

    def _chosen(
        self, values: Array, columns: Array, ordered: bool, peak: Array | None = None
    ) -> Candidates:
        ids = columns if self.ids is None else self.ops.take(self.ids, columns)
        # float64 from here on, always: a row's numbers must not depend on its neighbours' width.
        values = self.ops.double(values)
        by_id = self.by_id and not ordered
        return self._like(values, ids, ordered=ordered, by_id=by_id, peak=peak)

    def _like(
        self,
        logits: Array,
        ids: Array | None,
        *,
        ordered: bool = False,
        by_id: bool = False,
        peak: Array | None = None,
    ) -> Candidates:
        """Others of the same rows; `peak` where it is known that the likeliest are the same."""
        size, ops = self.vocabulary, self.ops
        return Candidates(
            logits, ids, vocabulary=size, ordered=ordered, by_id=by_id, peak=peak, ops=ops
        )
