"""Stages that change single tokens: repetition, frequency and presence penalties; bias and bans.

The vocabulary is copied once and not iterated over, except for the mask of a grammar.
"""

from __future__ import annotations

import math

import numpy as np

from unspool.errors import SettingsError
from unspool.sampling.arrays import Array
from unspool.sampling.candidates import INF, Candidates
from unspool.sampling.rows import Rows


class RepetitionPenalty:
    """Divides positive logits of tokens that occurred by the penalty, multiplies negative ones.

    (Keskar et al. 2019, with the usual correction for negative logits.)
    """

    name = "repetition_penalty"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        row, token, _ = rows.counts(candidates.vocabulary)
        penalty = np.array([s.repetition_penalty for s in rows.settings])[row]
        where = candidates.ops.where
        return candidates.revise(row, token, (penalty,), lambda x, p: where(x > 0, x / p, x * p))


class FrequencyPenalty:
    """Subtracts the penalty from a token's logit for each occurrence."""

    name = "frequency_penalty"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        row, token, count = rows.counts(candidates.vocabulary)
        amount = np.array([s.frequency_penalty for s in rows.settings])[row] * count
        return candidates.revise(row, token, (amount,), lambda x, p: x - p)


class PresencePenalty:
    """Subtracts the penalty once from the logit of each token that occurred."""

    name = "presence_penalty"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        row, token, _ = rows.counts(candidates.vocabulary)
        amount = np.array([s.presence_penalty for s in rows.settings])[row]
        return candidates.revise(row, token, (amount,), lambda x, p: x - p)


class LogitBias:
    """Adds to the logits of chosen tokens. -inf bans a token; with +inf only these remain."""

    name = "logit_bias"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        size = candidates.vocabulary
        row: list[int] = []
        token: list[int] = []
        bias: list[float] = []
        forced: list[tuple[int, int]] = []
        for number, settings in enumerate(rows.settings):
            for token_id, amount in settings.logit_bias.items():
                if token_id >= size:
                    raise SettingsError(
                        f"logit_bias has token {token_id}; the largest token id is {size - 1}"
                    )
                if amount == math.inf:
                    forced.append((number, token_id))
                else:
                    row.append(number)
                    token.append(token_id)
                    bias.append(amount)
        if forced:
            candidates = keep_only(candidates, forced)
        row_index = np.array(row, np.int64), np.array(token, np.int64)
        return candidates.revise(*row_index, (np.array(bias),), lambda x, b: x + b)


class Forbidden:
    """Bans `RowInput.forbidden`."""

    name = "forbidden"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        pairs = {(n, int(t)) for n, row in enumerate(rows.inputs) for t in row.forbidden}
        return ban(candidates, sorted(pairs))


class Allowed:
    """Keeps only the tokens that the grammar allows (`RowInput.allowed`)."""

    name = "grammar"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops, width = candidates.ops, candidates.vocabulary
        masks = {n: row.allowed for n, row in enumerate(rows.inputs) if row.allowed is not None}
        padded = np.zeros((len(masks), width), bool)
        for padded_row, mask in zip(padded, masks.values(), strict=True):
            padded_row[: mask.size] = mask[:width]
        row_index = np.array(list(masks), np.int64)
        if candidates.ids is not None:
            padded = np.take_along_axis(padded, ops.to_numpy(candidates.ids)[row_index], axis=-1)
        allowed = ops.to_array_like(padded, candidates.logits)
        if len(masks) == candidates.rows:
            return candidates.with_logits(ops.where(allowed, candidates.logits, -INF))
        logits = ops.copy(candidates.logits)  # other rows do not change
        where = ops.to_array_like(row_index, logits)
        logits[where] = ops.where(allowed, logits[where], -INF)
        return candidates.with_logits(logits)


def _set_minus_inf(logits: Array) -> Array:
    logits[:] = -INF
    return logits


def ban(candidates: Candidates, pairs: list[tuple[int, int]]) -> Candidates:
    """Remove distinct (row, token) pairs; tokens outside the vocabulary are ignored."""
    row_index = np.array(pairs, np.int64).reshape(-1, 2)
    row_index = row_index[(row_index[:, 1] >= 0) & (row_index[:, 1] < candidates.vocabulary)]
    return candidates.revise(row_index[:, 0], row_index[:, 1], (), _set_minus_inf)


def keep_only(candidates: Candidates, pairs: list[tuple[int, int]]) -> Candidates:
    """Remove all tokens but these (row, token) pairs, in the rows that occur in them."""
    row_index = np.array(pairs, np.int64).reshape(-1, 2)
    rows = np.zeros((candidates.rows, 1), bool)
    rows[row_index[:, 0]] = True
    allowed = np.zeros((candidates.rows, candidates.vocabulary), bool)
    allowed[row_index[:, 0], row_index[:, 1]] = True
    if candidates.ids is not None:
        allowed = np.take_along_axis(allowed, candidates.ops.to_numpy(candidates.ids), axis=-1)
    mask = candidates.ops.to_array_like(allowed | ~rows, candidates.logits)
    return candidates.with_logits(candidates.ops.where(mask, candidates.logits, -INF))
