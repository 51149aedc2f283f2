"""Shared by the tests that hold a picker against the chain of sampling stages."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from unspool.sampling import Chain, SamplingSettings, score
from unspool.sampling.picker import (
    HISTORY_END,
    HISTORY_START,
    POSITION,
    TARGET,
    SamplingRows,
    encode_canvas,
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


# For the places of a canvas.
CANVAS_SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.2, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.5, "seed": -3},
]


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


def canvas_rows(
    row_settings: SamplingSettings, count: int, width: int, chance: np.random.Generator
) -> SamplingRows:
    """Sampling rows of a canvas's places, in a late denoising step; every second has a token."""
    history = chance.integers(0, width, 12).tolist() if needs_history(row_settings) else []
    bounds = history_range(row_settings, 4, len(history)) if history else (0, 0)
    targets = [int(chance.integers(1, width)) if n % 2 else -1 for n in range(count)]
    return encode_canvas(
        row_settings, 2, range(5, 5 + count), 300, history, bounds, excluded=0, targets=targets
    )


def check_canvas(picked: Any, rows: SamplingRows, logits: Any, close: float = 0.0) -> None:
    """Hold picked tokens and details against the chain and `score`."""
    assert rows.canvas is not None
    masked = np.array(logits, np.float32)
    masked[:, 0] = -np.inf
    settings_list = [rows.settings(n) for n in range(len(rows.ints))]
    inputs = [rows.row_input(n) for n in range(len(rows.ints))]
    assert [(row.position, row.canvas_pass) for row in inputs[:2]] == [(5, 300), (6, 300)]
    expected = Chain(settings_list).pick(masked, inputs, top=2)
    assert picked.tokens.tolist() == [choice.token for choice in expected]
    scores = score(masked, np.maximum(rows.canvas[:, TARGET], 0))
    values = [
        (choice.entropy, choice.margin, scores.logprobs[n] if n % 2 else 0.0)
        for n, choice in enumerate(expected)
    ]
    np.testing.assert_allclose(picked.logprobs, [choice.logprob for choice in expected], atol=close)
    np.testing.assert_allclose(picked.details, values, atol=close)
