"""Stages that count what was written: repetition, frequency and presence penalties; bias and bans.

Each changes the logits of single tokens only, in the order (row, token): the vocabulary is copied
once and never walked through. (But for the mask of a grammar, which is about every token.)
"""

from __future__ import annotations

import math

import numpy as np

from unspool.errors import SettingsError
from unspool.sampling.arrays import Array
from unspool.sampling.candidates import INF, Candidates
from unspool.sampling.rows import Rows


class RepetitionPenalty:
    """Divides a positive logit of a token that occurred by the penalty, multiplies a negative one.

    (Keskar et al. 2019, with the sign put right as everyone does.)
    """

    name = "repetition_penalty"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        row, token, _ = rows.counts(candidates.vocabulary)
        penalty = np.array([s.repetition_penalty for s in rows.settings])[row]
        where = candidates.ops.where
        return candidates.revise(row, token, (penalty,), lambda x, by: where(x > 0, x / by, x * by))


class FrequencyPenalty:
    """Subtracts the penalty from a token's logit once for each time it occurred."""

    name = "frequency_penalty"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        row, token, count = rows.counts(candidates.vocabulary)
        amount = np.array([s.frequency_penalty for s in rows.settings])[row] * count
        return candidates.revise(row, token, (amount,), lambda x, by: x - by)


class PresencePenalty:
    """Subtracts the penalty once from the logit of every token that occurred."""

    name = "presence_penalty"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        row, token, _ = rows.counts(candidates.vocabulary)
        amount = np.array([s.presence_penalty for s in rows.settings])[row]
        return candidates.revise(row, token, (amount,), lambda x, by: x - by)


class LogitBias:
    """Adds to the logits of given tokens. -inf bans one; where any is +inf, only those remain."""

    name = "logit_bias"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        size = candidates.vocabulary
        row: list[int] = []
        token: list[int] = []
        bias: list[float] = []
        forced: list[tuple[int, int]] = []
        for number, settings in enumerate(rows.settings):
            for named, amount in settings.logit_bias.items():
                if named >= size:
                    raise SettingsError(
                        f"logit_bias named token {named}; the vocabulary ends at {size - 1}"
                    )
                if amount == math.inf:
                    forced.append((number, named))
                else:
                    row.append(number)
                    token.append(named)
                    bias.append(amount)
        if forced:
            candidates = only(candidates, forced)
        place = np.array(row, np.int64), np.array(token, np.int64)
        return candidates.revise(*place, (np.array(bias),), lambda x, by: x + by)


class Forbidden:
    """Bans the tokens that the caller forbade at this step (`RowInput.forbidden`)."""

    name = "forbidden"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        pairs = {(n, int(t)) for n, row in enumerate(rows.inputs) for t in row.forbidden}
        return ban(candidates, sorted(pairs))


class Allowed:
    """Keeps the tokens that the row's grammar allows at this step (`RowInput.allowed`)."""

    name = "grammar"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops, width = candidates.ops, candidates.vocabulary
        masks = {n: row.allowed for n, row in enumerate(rows.inputs) if row.allowed is not None}
        kept = np.zeros((len(masks), width), bool)
        for line, mask in zip(kept, masks.values(), strict=True):
            line[: mask.size] = mask[:width]
        place = np.array(list(masks), np.int64)
        if candidates.ids is not None:
            kept = np.take_along_axis(kept, ops.host(candidates.ids)[place], axis=-1)
        allowed = ops.like(kept, candidates.logits)
        if len(masks) == candidates.rows:
            return candidates.with_logits(ops.where(allowed, candidates.logits, -INF))
        logits = ops.copy(candidates.logits)  # the other rows stay as they are
        where = ops.like(place, logits)
        logits[where] = ops.where(allowed, logits[where], -INF)
        return candidates.with_logits(logits)


def _banned(logits: Array) -> Array:
    logits[:] = -INF
    return logits


def ban(candidates: Candidates, pairs: list[tuple[int, int]]) -> Candidates:
    """Removes single tokens, given as (row, token), each once; unknown ones are passed over."""
    place = np.array(pairs, np.int64).reshape(-1, 2)
    place = place[(place[:, 1] >= 0) & (place[:, 1] < candidates.vocabulary)]
    return candidates.revise(place[:, 0], place[:, 1], (), _banned)


def only(candidates: Candidates, pairs: list[tuple[int, int]]) -> Candidates:
    """In the rows named, removes every token but those given as (row, token)."""
    place = np.array(pairs, np.int64).reshape(-1, 2)
    rows = np.zeros((candidates.rows, 1), bool)
    rows[place[:, 0]] = True
    allowed = np.zeros((candidates.rows, candidates.vocabulary), bool)
    allowed[place[:, 0], place[:, 1]] = True
    if candidates.ids is not None:
        allowed = np.take_along_axis(allowed, candidates.ops.host(candidates.ids), axis=-1)
    kept = candidates.ops.like(allowed | ~rows, candidates.logits)
    return candidates.with_logits(candidates.ops.where(kept, candidates.logits, -INF))
