"""Log-probabilities and ranks of target tokens: the computation of `lm.score`.

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
from unspool.sampling.operations import array_operations
from unspool.sampling.rows import Tokens

_ROWS_PER_CHUNK = 64  # bounds the size of intermediate arrays

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probability and rank of each target, and the most likely tokens there."""

    logprobs: Floats  # [T]
    ranks: Tokens  # [T], 0: most likely
    entropies: Floats  # [T], nats
    top_tokens: Tokens  # [T, top]
    top_logprobs: Floats  # [T, top]


def log_softmax(logits: Array) -> Array:
    """Log-probabilities [rows, vocabulary], in the same type of array."""
    ops = array_operations(logits)
    model = Candidates(ops.prepare(logits))
    stats = model.softmax_stats()
    return model.logits - ops.to_array_like(stats.peak + ops.log(stats.total), model.logits)


def score(logits: Array, targets: Sequence[int] | Tokens, top: int = 0) -> Scores:
    """Score a target at every row of logits, with the `top` most likely tokens."""
    ops = array_operations(logits)
    target_ids = np.asarray(targets, dtype=np.int64)
    length, size = logits.shape
    if target_ids.shape != (length,):
        raise SettingsError(f"got {target_ids.size} targets for {length} rows of logits")
    if length and (target_ids.min() < 0 or target_ids.max() >= size):
        raise SettingsError(
            f"a target is outside of the vocabulary; it must be from 0 to {size - 1}"
        )
    top = max(0, min(top, size))
    scores = Scores(
        np.empty(length),
        np.empty(length, np.int64),
        np.empty(length),
        np.empty((length, top), np.int64),
        np.empty((length, top)),
    )
    for start in range(0, length, _ROWS_PER_CHUNK):
        chunk = slice(start, start + _ROWS_PER_CHUNK)
        model = Candidates(ops.prepare(logits[chunk]))
        stats = model.softmax_stats(entropy=True)
        norm = stats.peak + ops.log(stats.total)
        logit, rank = ops.logit_and_rank(model.logits, target_ids[chunk])
        scores.logprobs[chunk] = ops.to_numpy(logit - norm)[:, 0]
        scores.ranks[chunk] = ops.to_numpy(rank)
        scores.entropies[chunk] = ops.to_numpy(stats.entropy)[:, 0]
        if top:
            most_likely = model.top(top)
            scores.top_tokens[chunk] = ops.to_numpy(most_likely.ids)
            scores.top_logprobs[chunk] = ops.to_numpy(most_likely.logits - norm)
    return scores
