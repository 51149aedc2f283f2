"""Stages that remove candidates: top-k, top-p, min-p, typical, eta, top-n-sigma, XTC, mirostat.

At least one candidate is always kept. Over a whole vocabulary the stages look only at as many of
the likeliest as decide: a few are taken, checked whether they suffice, and more taken where not.
"""

from __future__ import annotations

import math

from unspool.sampling.candidates import INF, SLACK, Candidates
from unspool.sampling.draw import XTC_STREAM
from unspool.sampling.rows import Rows

FIRST_LOOK = 128
"""How many of the likeliest are looked at first."""
WIDER = 8
"""How many times more, when these do not suffice."""


class TopK:
    """Keeps the k likeliest; of equals at the border, those with the lower id."""

    name = "top_k"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        counts = [s.top_k for s in rows.settings]
        few = candidates.lead(max(counts))
        if min(counts) == max(counts):
            return few
        return few.first(rows.column("top_k", few.logits)[:, 0])


class TopP:
    """Keeps the fewest, likeliest first, whose mass reaches p, the one that crosses it included."""

    name = "top_p"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        whole = candidates.measure()
        goal = rows.column("top_p", whole.total) * (1 - SLACK) * whole.total
        width = candidates.logits.shape[-1]
        look = width if candidates.ordered else FIRST_LOOK
        while True:
            few, _, running = candidates.line(look)
            if look >= width or bool((running[:, -1:] >= goal).all()):
                return few.first(ops.count(running < goal) + 1)
            look *= WIDER


class MinP:
    """Keeps candidates at least min_p times as probable as the likeliest."""

    name = "min_p"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        peak = candidates.peak()
        return candidates.above(peak + candidates.ops.log(rows.column("min_p", peak)))


class Eta:
    """Keeps p ≥ min(ε, √ε · e^-H), H being the entropy. (Hewitt et al. 2022)"""

    name = "eta"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        whole = candidates.measure(entropy=True)
        log_epsilon = ops.log(rows.column("eta", whole.peak))
        log_least = ops.minimum(log_epsilon, 0.5 * log_epsilon - whole.entropy)
        return candidates.above(whole.peak + ops.log(whole.total) + log_least)


class TopNSigma:
    """Keeps logits within n standard deviations of the best one."""

    name = "top_n_sigma"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        peak = candidates.peak()
        kept = candidates.logits > -INF
        if candidates.ids is None:
            variance = ops.variance(candidates.logits, kept)
        else:
            number = ops.like(ops.count(kept), peak)[:, None]
            mean = ops.where(kept, candidates.logits, 0.0).cumsum(-1)[:, -1:] / number
            square = ops.where(kept, candidates.logits - mean, 0.0) ** 2
            variance = square.cumsum(-1)[:, -1:] / number
        return candidates.above(peak - rows.column("top_n_sigma", peak) * variance**0.5)


class Typical:
    """Keeps those whose surprise is nearest the entropy, nearest first, until their mass reaches p.

    The one that crosses is included. (Meister et al. 2022)
    """

    name = "typical_p"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        candidates = candidates if candidates.by_id else candidates.in_order()
        whole = candidates.measure(entropy=True)
        surprise_is_entropy = whole.peak + ops.log(whole.total) - whole.entropy
        nearness = -abs(ops.double(candidates.logits) - surprise_is_entropy)
        goal = rows.column("typical_p", whole.total) * (1 - SLACK) * whole.total
        width = candidates.logits.shape[-1]
        look = FIRST_LOOK
        while True:
            _, columns = ops.leading(nearness, look)
            near = ops.double(ops.take(candidates.logits, columns))
            weights = ops.exp(near - whole.peak)
            running = weights.cumsum(-1)
            if look >= width or bool((running[:, -1:] >= goal).all()):
                return candidates.chosen(columns, running - weights < goal)
            look *= WIDER


class Xtc:
    """Exclude top choices: at its probability, drops all with p ≥ threshold but the least likely.

    The coin is tossed from the row's own counter, in another stream than the token's draw.
    """

    name = "xtc"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        candidates = candidates if candidates.by_id else candidates.in_order()
        whole = candidates.measure()
        coin = ops.like(rows.uniform(XTC_STREAM), whole.peak)[:, None]
        tossed = coin < rows.column("xtc_probability", whole.peak)
        threshold = ops.log(rows.column("xtc_threshold", whole.peak))
        bound = whole.peak + ops.log(whole.total) + threshold - SLACK
        logits = candidates.logits
        top = (logits >= ops.like(bound, logits)) & (logits > -INF) & tossed
        least = ops.amin(ops.where(top, logits, INF))
        spared = ops.last_true(top & (logits == least))[:, None]
        dropped = top & (ops.columns(logits) != spared)
        return candidates.with_logits(ops.where(dropped, -INF, logits))


class Mirostat:
    """Mirostat v2: keeps candidates whose surprise in bits is at most mu.

    Mu moves after each pick so that the mean surprise stays near tau: see `mirostat_next`.
    """

    name = "mirostat"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        whole = candidates.measure()
        mu = ops.like(rows.mirostat_mu(), whole.peak)
        return candidates.above(whole.peak + ops.log(whole.total) - mu * math.log(2))


def mirostat_next(mu: float, probability: float, tau: float, eta: float) -> float:
    """Mu for the next token: mu - eta · (surprise of the pick - tau).

    The surprise is that of the pick in the distribution drawn from (after truncation), as in
    llama.cpp, so that values of tau mean the same here.
    """
    return mu - eta * (-math.log2(probability) - tau)
