"""What a backend picks by itself is what the chain of stages picks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.picker_support import (
    CANVAS_SETTINGS,
    SETTINGS,
    canvas_rows,
    check_canvas,
    random_logits,
    rows_of,
)
from unspool import native
from unspool.sampling import BadLogitsError, Chain, RowInput, SamplingSettings
from unspool.sampling import picker as picker_module
from unspool.sampling.picker import can_sample_on_device, pick_tokens


@pytest.mark.parametrize("by_chain", [False, True], ids=["native", "chain"])
@settings(max_examples=60, deadline=None)
@given(
    options=st.lists(SETTINGS, min_size=1, max_size=5),
    width=st.sampled_from([3, 67, 700, 5_000]),
    spread=st.sampled_from([0.0, 0.1, 2.0, 9.0]),
    seed=st.integers(0, 2**32),
)
def test_the_same_token_as_the_chain(
    by_chain: bool, options: list[dict[str, Any]], width: int, spread: float, seed: int
):
    """Any settings, any batch, rows with equal logits and with forbidden tokens among them."""
    if not by_chain and native.missing_reason() is not None:
        pytest.skip("no native library")
    chance = np.random.default_rng(seed)
    settings_list = [SamplingSettings(**choice) for choice in options]
    assert all(map(can_sample_on_device, settings_list))
    logits = random_logits(chance, len(settings_list), width, spread).astype(np.float32)
    texts = [chance.integers(0, width, chance.integers(1, 30)) for _ in settings_list]
    rows = rows_of(settings_list, texts)
    picked = (
        picker_module._pick_with_chain(logits, rows, range(len(settings_list)))
        if by_chain
        else pick_tokens(logits, rows, threads=2)
    )
    inputs = [RowInput(text, 1, sample=n) for n, text in enumerate(texts)]
    expected = Chain(settings_list).pick(logits, inputs)
    assert picked.tokens.tolist() == [choice.token for choice in expected]
    np.testing.assert_allclose(picked.logprobs, [choice.logprob for choice in expected], atol=2e-6)
    assert not picked.failures


@pytest.mark.parametrize("options", CANVAS_SETTINGS)
@pytest.mark.parametrize(("kind", "width"), [("numpy", 700), ("numpy", 40), ("torch", 700)])
def test_places_of_a_canvas(options: dict[str, Any], kind: str, width: int):
    """The chain's tokens, without the mask token, and what an order of unmasking needs."""
    chance = np.random.default_rng(width)
    logits = (chance.standard_normal((6, width)) * 2).astype(np.float32)
    rows = canvas_rows(SamplingSettings(**options), 6, width, chance)
    array: Any = logits.copy()
    if kind == "torch":
        array = pytest.importorskip("torch").from_numpy(array)
    check_canvas(pick_tokens(array, rows, threads=2), rows, logits, 2e-6 * (kind == "torch"))


def test_a_place_without_a_distribution_fails_alone():
    logits = np.zeros((3, 300), np.float32)
    logits[1] = np.nan
    logits[2, 5] = np.inf
    rows = canvas_rows(SamplingSettings(temperature=0), 3, 300, np.random.default_rng(0))
    picked = pick_tokens(logits, rows)
    assert set(picked.failures) == {1} and picked.tokens[2] == 5
    assert picked.details is not None and picked.details[0, 0] == pytest.approx(np.log(299))


def test_logits_that_give_no_distribution_fail_alone():
    logits = np.zeros((4, 300), np.float32)
    logits[1, 7] = np.nan
    logits[2] = -np.inf
    logits[3, 5] = np.inf
    settings_list = [SamplingSettings(temperature=0)] * 4
    picked = pick_tokens(logits, rows_of(settings_list, [np.array([0])] * 4))
    assert (picked.tokens[0], picked.tokens[3]) == (0, 5), "infinitely likely is picked"
    assert set(picked.failures) == {1, 2}
    assert isinstance(picked.failures[1], BadLogitsError)


@pytest.mark.parametrize(
    ("options", "ordinary"),
    [
        ({}, True),
        ({"temperature": 0}, True),
        ({"frequency_penalty": 0.2, "top_k": 0}, True),
        ({"stages": ("temperature", "top_k", "top_p", "min_p")}, False),
        ({"stages": ("top_k", "temperature")}, True),
        ({"logit_bias": {3: 1.0}}, False),
        ({"typical_p": 0.9}, False),
        ({"mirostat_tau": 3.0}, False),
        ({"dry_multiplier": 0.8}, False),
        ({"xtc_probability": 0.5}, False),
        ({"dynatemp_range": 0.5}, False),
    ],
)
def test_what_is_ordinary(options: dict[str, Any], ordinary: bool):
    assert can_sample_on_device(SamplingSettings.from_options(**options)) is ordinary
