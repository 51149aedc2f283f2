"""Stages that remove candidates: top-k, top-p, min-p, typical, eta, top-n-sigma, XTC, mirostat.

At least one candidate is always kept. On a whole vocabulary the stages sort only a few of the most
likely candidates first, and more if these are not enough.
"""

from __future__ import annotations

import math

from unspool.sampling.candidates import INF, SLACK, Candidates
from unspool.sampling.draw import XTC_STREAM
from unspool.sampling.rows import Rows

FIRST_CANDIDATES = 128
"""Number of most likely candidates that are sorted first."""
GROWTH = 8
"""Factor by which it grows if these are not enough."""


class TopK:
    """Keeps the k most likely; ties are broken by lower id."""

    name = "top_k"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        counts = [s.top_k for s in rows.settings]
        truncated = candidates.top(max(counts))
        if min(counts) == max(counts):
            return truncated
        return truncated.first_n(rows.column("top_k", truncated.logits)[:, 0])


class TopP:
    """Keeps the smallest set of most likely candidates whose mass reaches p."""

    name = "top_p"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        stats = candidates.softmax_stats()
        goal = rows.column("top_p", stats.total) * (1 - SLACK) * stats.total
        width = candidates.logits.shape[-1]
        count = width if candidates.is_sorted else FIRST_CANDIDATES
        while True:
            truncated, _, running = candidates.cumulative(count)
            if count >= width or bool((running[:, -1:] >= goal).all()):
                return truncated.first_n(ops.count(running < goal) + 1)
            count *= GROWTH


class MinP:
    """Keeps candidates with at least min_p times the top probability."""

    name = "min_p"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        peak = candidates.peak()
        return candidates.at_or_above(peak + candidates.ops.log(rows.column("min_p", peak)))


class Eta:
    """Keeps p ≥ min(ε, √ε · e^-H), H being the entropy. (Hewitt et al. 2022)"""

    name = "eta"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        stats = candidates.softmax_stats(entropy=True)
        log_epsilon = ops.log(rows.column("eta", stats.peak))
        log_bound = ops.minimum(log_epsilon, 0.5 * log_epsilon - stats.entropy)
        return candidates.at_or_above(stats.peak + ops.log(stats.total) + log_bound)


class TopNSigma:
    """Keeps logits within n standard deviations of the largest."""

    name = "top_n_sigma"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        peak = candidates.peak()
        mask = candidates.logits > -INF
        if candidates.ids is None:
            variance = ops.variance(candidates.logits, mask)
        else:
            num_candidates = ops.to_array_like(ops.count(mask), peak)[:, None]
            mean = ops.where(mask, candidates.logits, 0.0).cumsum(-1)[:, -1:] / num_candidates
            square = ops.where(mask, candidates.logits - mean, 0.0) ** 2
            variance = square.cumsum(-1)[:, -1:] / num_candidates
        return candidates.at_or_above(peak - rows.column("top_n_sigma", peak) * variance**0.5)


class Typical:
    """Keeps candidates whose surprisal is nearest the entropy, until their mass reaches p.

    (Meister et al. 2022)
    """

    name = "typical_p"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        candidates = candidates if candidates.sorted_by_id else candidates.sort_by_logit()
        stats = candidates.softmax_stats(entropy=True)
        typical_logit = stats.peak + ops.log(stats.total) - stats.entropy
        closeness = -abs(ops.to_float64(candidates.logits) - typical_logit)
        goal = rows.column("typical_p", stats.total) * (1 - SLACK) * stats.total
        width = candidates.logits.shape[-1]
        count = FIRST_CANDIDATES
        while True:
            _, columns = ops.largest(closeness, count)
            nearest = ops.to_float64(ops.take_columns(candidates.logits, columns))
            weights = ops.exp(nearest - stats.peak)
            running = weights.cumsum(-1)
            if count >= width or bool((running[:, -1:] >= goal).all()):
                return candidates.select(columns, running - weights < goal)
            count *= GROWTH


class Xtc:
    """Exclude top choices: with a probability, drops all with p ≥ threshold but the least likely.

    Its random number has another stream than that of the token.
    """

    name = "xtc"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        candidates = candidates if candidates.sorted_by_id else candidates.sort_by_logit()
        stats = candidates.softmax_stats()
        random = ops.to_array_like(rows.uniform(XTC_STREAM), stats.peak)[:, None]
        is_active = random < rows.column("xtc_probability", stats.peak)
        threshold = ops.log(rows.column("xtc_threshold", stats.peak))
        bound = stats.peak + ops.log(stats.total) + threshold - SLACK
        logits = candidates.logits
        is_top = (logits >= ops.to_array_like(bound, logits)) & (logits > -INF) & is_active
        lowest = ops.amin(ops.where(is_top, logits, INF))
        kept_column = ops.last_true(is_top & (logits == lowest))[:, None]
        is_dropped = is_top & (ops.column_index(logits) != kept_column)
        return candidates.with_logits(ops.where(is_dropped, -INF, logits))


class Mirostat:
    """Mirostat v2: keeps candidates whose surprisal in bits is at most mu.

    Mu is adjusted after each token so that the mean surprisal stays near tau: `mirostat_next`.
    """

    name = "mirostat"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        stats = candidates.softmax_stats()
        mu = ops.to_array_like(rows.mirostat_mu(), stats.peak)
        return candidates.at_or_above(stats.peak + ops.log(stats.total) - mu * math.log(2))


def mirostat_next(mu: float, probability: float, tau: float, eta: float) -> float:
    """Mu for the next token: mu - eta · (surprisal of the pick - tau).

    The surprisal is that after truncation, as in llama.cpp, so that tau has the same meaning.
    """
    return mu - eta * (-math.log2(probability) - tau)
