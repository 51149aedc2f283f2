"""Shared by the tests that hold a picker against the chain of sampling stages."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from unspool.sampling import SamplingSettings
from unspool.sampling.picker import (
    HISTORY_END,
    HISTORY_START,
    POSITION,
    SamplingRows,
    encode_settings,
    history_range,
    needs_history,
)

# All that a picker can do by itself.
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-9, 0.3, 0.8, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 5, 40, 10_000]),
        "top_p": st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.1, 0.9, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.7, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.4, -0.3]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "penalty_window": st.sampled_from([-1, 0, 3]),
        "penalize_prompt": st.booleans(),
        "seed": st.integers(-(2**63), 2**70),
    },
)


def random_logits(chance: np.random.Generator, rows: int, width: int, spread: float) -> Any:
    """Now and then with many equals, and with tokens that are forbidden."""
    logits = chance.standard_normal((rows, width)) * spread
    if chance.random() < 0.3:
        logits = np.round(logits)
    if chance.random() < 0.3:
        logits[:, chance.integers(0, width, width // 2)] = -np.inf
        logits[:, 0] = 0.5
    return logits


def rows_of(
    settings_list: list[SamplingSettings], texts: list[Any], prompt: int = 1
) -> SamplingRows:
    """Sampling rows for the next token of each text; its first `prompt` tokens are the prompt."""
    floats, ints, histories, at = [], [], [], 0
    for number, (row_settings, text) in enumerate(zip(settings_list, texts, strict=True)):
        row_floats, row_ints = encode_settings(row_settings, sample=number)
        row_ints[POSITION] = len(text)
        start, end = history_range(row_settings, prompt, len(text))
        if needs_history(row_settings):
            row_ints[HISTORY_START], row_ints[HISTORY_END] = at, at + end - start
            histories.append(text[start:end])
            at += end - start
        floats.append(row_floats)
        ints.append(row_ints)
    history = np.concatenate(histories) if histories else np.empty(0, np.int64)
    return SamplingRows(np.array(floats), np.array(ints), history)
