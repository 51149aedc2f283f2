"""Small helpers that the sampling tests share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from unspool.sampling import STAGES, Candidates, RowInput, Rows, SamplingSettings
from unspool.sampling.rows import RowSettings

Matrix = np.ndarray[Any, Any]


# Settings of every kind of chain.
CHAINS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    {"repetition_penalty": 1.2, "penalty_window": 20, "penalize_prompt": False},
    {"top_k": 0, "min_p": 0.0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.02},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0},
    {"top_k": 5000, "top_p": 0.999, "temperature": 1.4},
    {"stages": ("temperature", "top_k", "top_p", "min_p"), "temperature": 1.3},
    {"typical_p": 0.5, "top_k": 0},
    {"eta": 0.01, "top_k": 0},
    {"top_n_sigma": 1.0},
    {"xtc_probability": 0.7, "xtc_threshold": 0.05},
    {"dynatemp_range": 0.4},
    {"mirostat_tau": 3.0},
    {"no_repeat_ngram": 2, "dry_multiplier": 0.8},
    {"logit_bias": {3: 2.0, 7: -math.inf}},
    {"logit_bias": {3: math.inf, 250: math.inf}},
]


def neutral(**options: Any) -> SamplingSettings:
    """Settings in which nothing is on but what is given."""
    off: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return SamplingSettings(**(off | options))


def apply(
    name: str,
    logits: Any,
    settings: SamplingSettings | Sequence[SamplingSettings],
    rows: Sequence[RowInput] | None = None,
) -> Candidates:
    """One stage by itself, on logits [rows, vocabulary]."""
    many = [settings] * len(logits) if isinstance(settings, SamplingSettings) else list(settings)
    inputs = [RowInput()] * len(logits) if rows is None else list(rows)
    with np.errstate(all="ignore"):
        return STAGES[name].apply(Candidates(logits), Rows(RowSettings(many), inputs))


def dense(candidates: Candidates) -> Matrix:
    """The logits over the whole vocabulary, -inf where removed."""
    logits = candidates.ops.to_numpy(candidates.logits)
    if candidates.ids is None:
        return logits
    full = np.full((candidates.rows, candidates.vocabulary), -np.inf)
    ids = candidates.ops.to_numpy(candidates.ids)
    for row in range(candidates.rows):
        mask = logits[row] > -np.inf
        full[row, ids[row][mask]] = logits[row][mask]
    return full


def softmax(logits: Matrix) -> Matrix:
    logits = np.asarray(logits, dtype=np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def after(
    name: str,
    probabilities: Sequence[float],
    settings: SamplingSettings,
    history: Sequence[int] = (),
) -> Matrix:
    """The probabilities that a stage makes of given ones."""
    logits = np.log(np.array([probabilities], dtype=np.float32))
    return softmax(dense(apply(name, logits, settings, [RowInput(history=history)])))[0]


def random_logits(seed: int, rows: int, width: int, spread: float = 3.0) -> Matrix:
    """Logits as models give them: a bell, and a few that stand out."""
    generator = np.random.default_rng(seed)
    logits = generator.standard_normal((rows, width)) * spread
    for row in range(rows):
        few = generator.integers(0, width, 5)
        logits[row, few] += generator.exponential(spread, 5)
    return logits.astype(np.float32)
