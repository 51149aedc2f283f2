"""Candidate tokens of one step, for every row of a batch.

A row starts as the whole vocabulary, one column per token. A truncating stage leaves a few: from
then on there are only columns for these, in float64 and with their token ids, and later stages are
cheap. Removed candidates and padding have the logit -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from unspool.errors import SettingsError, UnspoolError
from unspool.sampling.arrays import LOWEST, Array, Operations, array_operations


class RowError(Exception):
    """Base of errors that concern some rows of a batch only."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class BadLogitsError(RowError, UnspoolError):
    """The model's logits are not usable: NaN, or all -inf."""


class StageError(RowError, SettingsError):
    """A caller's stage function failed."""


class NoCandidateError(RowError, SettingsError):
    """The settings forbid every token of the vocabulary."""


ROW_ERRORS = (BadLogitsError, StageError, NoCandidateError)
"""Errors that concern some rows only."""


SLACK = 1e-6
"""Relative tolerance of masses and probabilities: float32 logits are not more precise, and
0.4 + 0.3 must reach 0.7."""

INF = float("inf")


class SoftmaxStats(NamedTuple):
    """Softmax statistics of each row, [rows, 1] in float64 each."""

    peak: Array  # the largest logit
    total: Array  # Σ exp(logit - peak)
    entropy: Array | None  # in nats
    weights: Array | None = None  # exp(logit - peak) [rows, K], after truncation
    running: Array | None = None  # cumulative sums of the weights [rows, K]


class Candidates:
    """Logits [rows, K] of the remaining candidates and, unless K is the vocabulary, their ids."""

    __slots__ = (
        "_peak", "_remaining", "_softmax_stats", "_top", "ids", "is_scratch", "is_sorted", "logits",
        "ops", "sorted_by_id", "vocabulary",
    )  # fmt: skip

    def __init__(
        self,
        logits: Array,
        ids: Array | None = None,
        *,
        vocabulary: int = 0,
        is_sorted: bool = False,
        sorted_by_id: bool = False,
        peak: Array | None = None,
        ops: Operations | None = None,
    ) -> None:
        self.ops = ops or array_operations(logits)
        self.logits = logits
        self.ids = ids
        self.vocabulary = vocabulary or logits.shape[-1]
        self.is_sorted = is_sorted  # highest logit first, ties by lower id, removed last
        self.sorted_by_id = (
            sorted_by_id or ids is None
        )  # columns ascend by token id, so ties are in order
        self.is_scratch = False  # the logits are a private copy that `revise` may overwrite
        self._peak = peak
        self._softmax_stats: SoftmaxStats | None = None
        self._remaining: Array | None = None
        self._top: Candidates | None = None

    @property
    def rows(self) -> int:
        return int(self.logits.shape[0])

    def peak(self) -> Array:
        """Largest logit of each row. Makes +inf finite; raises if a row has no candidate."""
        if self._peak is not None:
            return self._peak
        peak = self.logits[:, :1] if self.is_sorted else self.ops.amax(self.logits)
        return self._set_peak(self.ops.to_float64(peak))

    def _set_peak(self, peak: Array) -> Array:
        peaks = self.ops.to_numpy(peak)[:, 0]
        if not all(map(math.isfinite, peaks.tolist())):
            self._raise_if_invalid(peaks)
            # +inf logits: only these candidates remain, all equal.
            is_inf, is_inf_row = self.logits == INF, peak == INF
            self.logits = self.ops.where(is_inf_row & is_inf, 0.0, self.logits)
            self.logits = self.ops.where(is_inf_row & ~is_inf, -INF, self.logits)
            peak = self.ops.where(is_inf_row, 0.0, peak)
            self._top = None
        self._peak = peak
        return peak

    def _raise_if_invalid(self, peaks: np.ndarray[Any, Any]) -> None:
        bad = np.flatnonzero(np.isnan(peaks))
        if bad.size:
            raise BadLogitsError("the model gave NaN logits", bad.tolist())
        empty = np.flatnonzero(peaks == -INF)
        if empty.size:
            raise NoCandidateError("every token is forbidden", empty.tolist())

    def softmax_stats(self, entropy: bool = False) -> SoftmaxStats:
        """Peak, total and, if requested, entropy; cached."""
        stats = self._softmax_stats
        if stats is not None and (stats.entropy is not None or not entropy):
            return stats
        if self.ids is not None:
            self._softmax_stats = self._stats_of_few(entropy)
            return self._softmax_stats
        peak, total, entropies = self.ops.softmax_stats(self.logits, self._peak, entropy)
        if self._peak is None and self._set_peak(peak) is not peak:  # +inf logits were replaced
            peak, total, entropies = self.ops.softmax_stats(self.logits, self._peak, entropy)
        self._softmax_stats = SoftmaxStats(peak, total, entropies)
        return self._softmax_stats

    def _stats_of_few(self, entropy: bool) -> SoftmaxStats:
        peak = self.peak()
        shifted = self.logits - peak
        weights = self.ops.exp(shifted)
        running = weights.cumsum(-1)
        total, entropies = running[:, -1:], None
        if entropy:  # 0 * -inf counts as 0
            moment = (weights * self.ops.clamp_min(shifted, LOWEST)).cumsum(-1)[:, -1:]
            entropies = self.ops.log(total) - moment / total
        return SoftmaxStats(peak, total, entropies, weights, running)

    def remaining(self) -> Array:
        """Number of remaining candidates of each row; [rows]."""
        if self._remaining is None:
            self._remaining = self.ops.count(self.logits > -INF)
        return self._remaining

    def top(self, count: int) -> Candidates:
        """The `count` most likely of each row, highest logit first."""
        if self.is_sorted:
            return self._truncate(count)
        if not self.sorted_by_id:
            return self.sort_by_logit()._truncate(count)
        if self._top is None or self._top.logits.shape[-1] < count:
            values, columns = self.ops.largest(self.logits, count)
            self._top = self._select(values, columns, is_sorted=True, peak=self._peak)
        return self._top._truncate(count)

    def cumulative(self, count: int) -> tuple[Candidates, Array, Array]:
        """The `count` most likely, their exp(logit - peak), and the cumulative sums of these."""
        truncated, full_stats = self.top(count), self.softmax_stats()
        if full_stats.weights is not None and full_stats.running is not None and self.is_sorted:
            return truncated, full_stats.weights[:, :count], full_stats.running[:, :count]
        weights = self.ops.exp(truncated.logits - full_stats.peak)
        return truncated, weights, weights.cumsum(-1)

    def sort_by_logit(self) -> Candidates:
        """All candidates, highest logit first, ties by lower id."""
        if self.is_sorted:
            return self
        if self.sorted_by_id:
            return self.top(self.logits.shape[-1])
        sorted_by_id = self.ops.argsort_rows(self.ids)
        logits = self.ops.take_columns(self.logits, sorted_by_id)
        order = self.ops.argsort_rows(-logits)
        ids = self.ops.take_columns(self.ops.take_columns(self.ids, sorted_by_id), order)
        return self._derive(self.ops.take_columns(logits, order), ids, is_sorted=True)

    def at_or_above(self, bound: Array) -> Candidates:
        """Candidates with a logit >= the row's bound, and always the most likely one."""
        bound = self.ops.minimum(bound - SLACK, self.peak())
        if self.is_sorted:
            return self.first_n(self.ops.count(self.logits >= bound))
        if self.ids is not None and self.logits.shape[-1] <= 256:
            mask = self.logits >= bound
            return self.with_logits(self.ops.where(mask, self.logits, -INF))
        values, columns = self.ops.at_or_above(self.logits, bound)
        return self._select(values, columns, is_sorted=False, peak=self._peak)

    def first_n(self, counts: Array) -> Candidates:
        """The first `counts[row]` (at least one) of sorted candidates."""
        if self.rows == 1:
            return self._truncate(max(1, int(counts[0])))
        truncated = self._truncate(max(1, int(counts.max())))
        mask = self.ops.column_index(truncated.logits) < self.ops.clamp_min(counts, 1)[:, None]
        logits = self.ops.where(mask, truncated.logits, -INF)
        return self._derive(logits, truncated.ids, is_sorted=True, peak=truncated._peak)

    def select(self, columns: Array, mask: Array) -> Candidates:
        """Candidates of these columns [rows, n] where `mask` [rows, n] is set, unsorted."""
        logits = self.ops.where(mask, self.ops.take_columns(self.logits, columns), -INF)
        result = self._select(logits, columns, is_sorted=False)
        result.sorted_by_id = False
        return result

    def with_logits(self, logits: Array, is_sorted: bool = False) -> Candidates:
        return self._derive(logits, self.ids, is_sorted=is_sorted, sorted_by_id=self.sorted_by_id)

    def revise(
        self,
        rows: np.ndarray[Any, Any],
        tokens: np.ndarray[Any, Any],
        amounts: tuple[np.ndarray[Any, Any], ...],
        change: Callable[..., Array],
    ) -> Candidates:
        """Change the logits of single tokens: change(logits, *amounts), all flat and aligned.

        No (row, token) may occur twice, and tokens must be in the vocabulary. Tokens that were
        removed are ignored.
        """
        if self.ids is not None:
            rows, tokens, amounts = self._locate(rows, tokens, amounts)
        if not rows.size:
            return self
        logits = self.logits if self.is_scratch else self.ops.copy(self.logits)
        deltas = [self.ops.to_array_like(amount, logits) for amount in amounts]
        token_index = self.ops.to_array_like(tokens, logits)
        if self.rows == 1:  # twice as fast
            row_logits = logits[0]
            row_logits[token_index] = change(row_logits[token_index], *deltas)
        else:
            index = (self.ops.to_array_like(rows, logits), token_index)
            logits[index] = change(logits[index], *deltas)
        revised = self.with_logits(logits)
        revised.is_scratch = True
        return revised

    def _locate(
        self,
        rows: np.ndarray[Any, Any],
        tokens: np.ndarray[Any, Any],
        amounts: tuple[np.ndarray[Any, Any], ...],
    ) -> tuple[Any, Any, tuple[Any, ...]]:
        """(row, column) of those (row, token) pairs that are still candidates."""
        if not rows.size:
            return rows, tokens, amounts
        keys = rows * self.vocabulary + tokens
        order = np.argsort(keys)
        keys = keys[order]
        ids = self.ops.to_numpy(self.ids) + np.arange(self.rows)[:, None] * self.vocabulary
        nearest = np.minimum(np.searchsorted(keys, ids), keys.size - 1)
        is_match = (keys[nearest] == ids) & (self.ops.to_numpy(self.logits) > -INF)
        row, column = np.nonzero(is_match)
        source = order[nearest[row, column]]
        return row, column, tuple(amount[source] for amount in amounts)

    def _truncate(self, count: int) -> Candidates:
        if self.ids is None or count >= self.logits.shape[-1]:
            return self
        truncated = self.logits[:, :count], self.ids[:, :count]
        return self._derive(*truncated, is_sorted=True, peak=self._peak)

    def _select(
        self, values: Array, columns: Array, is_sorted: bool, peak: Array | None = None
    ) -> Candidates:
        ids = columns if self.ids is None else self.ops.take_columns(self.ids, columns)
        # Always float64 from here on: a row's result must not depend on other rows' width.
        values = self.ops.to_float64(values)
        sorted_by_id = self.sorted_by_id and not is_sorted
        return self._derive(values, ids, is_sorted=is_sorted, sorted_by_id=sorted_by_id, peak=peak)

    def _derive(
        self,
        logits: Array,
        ids: Array | None,
        *,
        is_sorted: bool = False,
        sorted_by_id: bool = False,
        peak: Array | None = None,
    ) -> Candidates:
        """Other candidates of the same rows; `peak` if it is known to be unchanged."""
        size, ops = self.vocabulary, self.ops
        return Candidates(
            logits,
            ids,
            vocabulary=size,
            is_sorted=is_sorted,
            sorted_by_id=sorted_by_id,
            peak=peak,
            ops=ops,
        )
