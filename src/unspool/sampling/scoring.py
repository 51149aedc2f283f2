"""How likely given tokens are under given logits: the numbers behind `lm.score`.

scores = score(logits, targets, top=5)     # logits [T, vocabulary], targets [T]
scores.logprobs, scores.ranks, scores.entropies, scores.top_tokens, scores.top_logprobs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.errors import SettingsError
from unspool.sampling.arrays import Array
from unspool.sampling.candidates import Candidates
from unspool.sampling.operations import operations
from unspool.sampling.rows import Tokens

_AT_ONCE = 64  # rows: the arrays in between stay small, however long the text

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Scores:
    """For each position: the target's log-probability and rank, and the likeliest tokens there."""

    logprobs: Floats  # [T]
    ranks: Tokens  # [T], 0: likeliest
    entropies: Floats  # [T], nats
    top_tokens: Tokens  # [T, top]
    top_logprobs: Floats  # [T, top]


def log_softmax(logits: Array) -> Array:
    """Log-probabilities [rows, vocabulary], in the kind of array given."""
    ops = operations(logits)
    model = Candidates(ops.prepare(logits))
    own = model.measure()
    return model.logits - ops.like(own.peak + ops.log(own.total), model.logits)


def score(logits: Array, targets: Sequence[int] | Tokens, top: int = 0) -> Scores:
    """Log-probability, rank and the `top` likeliest, at every row of logits."""
    ops = operations(logits)
    wanted = np.asarray(targets, dtype=np.int64)
    length, size = logits.shape
    if wanted.shape != (length,):
        raise SettingsError(f"{wanted.size} targets were given for {length} rows of logits")
    if length and (wanted.min() < 0 or wanted.max() >= size):
        raise SettingsError(f"a target lay outside the vocabulary; it may be 0 to {size - 1}")
    top = max(0, min(top, size))
    scores = Scores(
        np.empty(length),
        np.empty(length, np.int64),
        np.empty(length),
        np.empty((length, top), np.int64),
        np.empty((length, top)),
    )
    for start in range(0, length, _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        model = Candidates(ops.prepare(logits[part]))
        own = model.measure(entropy=True)
        norm = own.peak + ops.log(own.total)
        level, rank = ops.standing(model.logits, wanted[part])
        scores.logprobs[part] = ops.host(level - norm)[:, 0]
        scores.ranks[part] = ops.host(rank)
        scores.entropies[part] = ops.host(own.entropy)[:, 0]
        if top:
            best = model.lead(top)
            scores.top_tokens[part] = ops.host(best.ids)
            scores.top_logprobs[part] = ops.host(best.logits - norm)
    return scores
