"""Each stage that transformers has, on random logits: the same candidates, the same logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as peers

from helpers.sampling_support import apply, dense, neutral, random_logits
from unspool.sampling import RowInput

WIDTHS = st.sampled_from([5, 64, 1000, 5000])
SEEDS = st.integers(0, 10_000)
quick = settings(max_examples=40, deadline=None)


def peer(processor: Any, logits: np.ndarray[Any, Any], history: Any = None) -> Any:
    ids = torch.zeros((len(logits), 0), dtype=torch.long)
    if history is not None:
        ids = torch.as_tensor(np.asarray(history))
    return processor(ids, torch.from_numpy(logits.astype(np.float64))).numpy()


def same_but_for_the_border(
    result: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], logits: np.ndarray[Any, Any]
) -> None:
    """Kept logits agree; where one kept a token that the other did not, it is a border case.

    There the two may differ by one token, or have swapped two that are equally near to 1e-6.
    """
    is_finite = np.isfinite(result) & np.isfinite(expected)
    assert np.allclose(result[is_finite], expected[is_finite], rtol=1e-5, atol=1e-5)
    for row in np.flatnonzero((np.isfinite(result) != np.isfinite(expected)).any(-1)):
        finite, expected_finite = np.isfinite(result[row]), np.isfinite(expected[row])
        assert (finite & ~expected_finite).sum() <= 1 and (expected_finite & ~finite).sum() <= 1, (
            logits[row]
        )


@pytest.mark.parametrize(
    ("stage", "options", "make"),
    [
        ("temperature", {"temperature": 0.3}, lambda: peers.TemperatureLogitsWarper(0.3)),
        ("temperature", {"temperature": 1.7}, lambda: peers.TemperatureLogitsWarper(1.7)),
        ("top_k", {"top_k": 1}, lambda: peers.TopKLogitsWarper(1)),
        ("top_k", {"top_k": 50}, lambda: peers.TopKLogitsWarper(50)),
        ("top_p", {"top_p": 0.1}, lambda: peers.TopPLogitsWarper(0.1)),
        ("top_p", {"top_p": 0.95}, lambda: peers.TopPLogitsWarper(0.95)),
        ("min_p", {"min_p": 0.05}, lambda: peers.MinPLogitsWarper(0.05)),
        ("min_p", {"min_p": 1.0}, lambda: peers.MinPLogitsWarper(1.0)),
        ("typical_p", {"typical_p": 0.2}, lambda: peers.TypicalLogitsWarper(0.2)),
        ("typical_p", {"typical_p": 0.9}, lambda: peers.TypicalLogitsWarper(0.9)),
        ("eta", {"eta": 0.0009}, lambda: peers.EtaLogitsWarper(0.0009)),
        ("eta", {"eta": 0.3}, lambda: peers.EtaLogitsWarper(0.3)),
    ],
)
@given(seed=SEEDS, width=WIDTHS, spread=st.sampled_from([0.2, 1.0, 4.0]))
@quick
def test_distribution_stages(
    stage: str,
    options: dict[str, Any],
    make: Callable[[], Any],
    seed: int,
    width: int,
    spread: float,
) -> None:
    logits = random_logits(seed, 3, width, spread)
    result = dense(apply(stage, logits, neutral(**options)))
    same_but_for_the_border(result, peer(make(), logits), logits)


@given(seed=SEEDS, width=st.integers(4, 40), length=st.integers(0, 60))
@quick
def test_repetition_and_ngram(seed: int, width: int, length: int) -> None:
    logits = random_logits(seed, 2, width)
    history = np.random.default_rng(seed).integers(0, width, (2, length))
    inputs = [RowInput(history=row) for row in history]
    result = dense(apply("repetition_penalty", logits, neutral(repetition_penalty=1.3), inputs))
    expected = peer(peers.RepetitionPenaltyLogitsProcessor(1.3), logits, history)
    assert np.allclose(result, expected, rtol=1e-6)
    for size in (1, 2, 3):
        result = dense(apply("no_repeat_ngram", logits, neutral(no_repeat_ngram=size), inputs))
        expected = peer(peers.NoRepeatNGramLogitsProcessor(size), logits, history)
        assert np.allclose(result, expected, rtol=1e-6)


def test_bias_is_their_sequence_bias_of_single_tokens() -> None:
    logits = random_logits(3, 2, 50)
    bias = {3: 4.0, 7: -100.0, 9: float("-inf")}
    result = dense(apply("logit_bias", logits, neutral(logit_bias=bias)))
    history = np.zeros((2, 1), dtype=np.int64)
    processor = peers.SequenceBiasLogitsProcessor({(token,): by for token, by in bias.items()})
    assert np.allclose(result, peer(processor, logits, history), rtol=1e-6)
