"""Stages against their formula, computed plainly; their borders; every order of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.sampling_support import apply, dense, neutral, random_logits, softmax
from unspool.errors import SettingsError
from unspool.sampling import (
    STAGES,
    BadLogitsError,
    Candidates,
    Chain,
    NoCandidateError,
    RowInput,
    SamplingSettings,
    StageState,
    uniform,
)
from unspool.sampling.draw import XTC_STREAM

SEEDS = st.integers(0, 10_000)
quick = settings(max_examples=40, deadline=None)


def remaining_ids(candidates: Candidates) -> list[set[int]]:
    return [set(np.flatnonzero(row > -np.inf).tolist()) for row in dense(candidates)]


@given(seed=SEEDS, width=st.sampled_from([7, 300, 3000, 20_000]), p=st.floats(0.01, 0.999))
@quick
def test_top_p_without_a_sort_is_top_p_with_one(seed: int, width: int, p: float) -> None:
    logits = random_logits(seed, 2, width, spread=1.5)
    result = remaining_ids(apply("top_p", logits, neutral(top_p=p)))
    for row, chances in enumerate(softmax(logits)):
        order = np.lexsort((np.arange(width), -chances))
        mass_before = np.cumsum(chances[order]) - chances[order]
        near = 2e-6
        assert set(order[mass_before < p - near].tolist()) <= result[row]
        assert result[row] <= set(order[mass_before < p + near].tolist())


@given(seed=SEEDS, width=st.sampled_from([9, 400, 3000, 50_000]), count=st.integers(1, 700))
@quick
def test_the_leading_are_those_of_a_full_sort(seed: int, width: int, count: int) -> None:
    logits = np.round(random_logits(seed, 2, width), 1)  # many equals
    logits[0, ::3] = -np.inf
    line = Candidates(logits).top(count)
    for row in range(2):
        order = np.lexsort((np.arange(width), -logits[row]))[:count]
        finite = logits[row][order] > -np.inf
        assert line.ids[row][finite].tolist() == order[finite].tolist()


def test_top_k_keeps_exactly_k_of_equals_the_lowest_ids() -> None:
    assert remaining_ids(apply("top_k", np.zeros((1, 5000), np.float32), neutral(top_k=3))) == [
        {0, 1, 2}
    ]


def test_each_row_has_its_own_k() -> None:
    logits = random_logits(0, 3, 2000)
    result = remaining_ids(apply("top_k", logits, [neutral(top_k=k) for k in (1, 7, 300)]))
    assert [len(row) for row in result] == [1, 7, 300]


@given(seed=SEEDS, sigma=st.floats(0.1, 4))
@quick
def test_top_n_sigma_formula(seed: int, sigma: float) -> None:
    logits = random_logits(seed, 2, 500)
    logits[1, :100] = -np.inf
    for row, result in enumerate(
        remaining_ids(apply("top_n_sigma", logits, neutral(top_n_sigma=sigma)))
    ):
        finite = logits[row][np.isfinite(logits[row])].astype(np.float64)
        bound = finite.max() - sigma * finite.std()
        assert result >= set(np.flatnonzero(logits[row] >= bound + 1e-4).tolist())
        assert result <= set(np.flatnonzero(logits[row] >= bound - 1e-4).tolist())


@given(seed=SEEDS, exponent=st.floats(0, 3), span=st.floats(0.01, 2))
@quick
def test_dynamic_temperature_formula(seed: int, exponent: float, span: float) -> None:
    logits = random_logits(seed, 2, 300)
    logits[1, :50] = -np.inf
    options = {"temperature": 0.9, "dynatemp_range": span, "dynatemp_exponent": exponent}
    result = softmax(dense(apply("dynamic_temperature", logits, neutral(**options))))
    for row, chances in enumerate(softmax(logits)):
        alive = chances[chances > 0]
        entropy = -(alive * np.log(alive)).sum()
        low, high = max(0.0, 0.9 - span), 0.9 + span
        temperature = low + (high - low) * (entropy / math.log(len(alive))) ** exponent
        assert np.allclose(result[row], softmax(logits[row] / temperature), atol=1e-5)


def test_dynamic_temperature_takes_the_place_of_the_fixed_one() -> None:
    logits = random_logits(5, 1, 100)
    only = Chain(neutral(temperature=0.5, dynatemp_range=0.3)).pick(logits, explain=True)[0]
    assert [stage.name for stage in only.stages] == ["dynamic_temperature"]


@given(seed=SEEDS, length=st.integers(0, 40), vocabulary=st.integers(2, 5))
@quick
def test_dry_formula(seed: int, length: int, vocabulary: int) -> None:
    history = np.random.default_rng(seed).integers(0, vocabulary, length)
    text = history.tolist()
    breakers = (vocabulary - 1,)
    options: dict[str, Any] = {"dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 2}
    logits = np.zeros((1, vocabulary), np.float32)
    settings_ = neutral(**options, dry_breakers=breakers)
    result = dense(apply("dry", logits, settings_, [RowInput(history=history)]))[0]
    for token in range(vocabulary):
        longest = 0
        for at in range(length):
            if text[at] != token:
                continue
            n = 0
            while n < at and text[at - 1 - n] == text[-1 - n] and text[-1 - n] not in breakers:
                n += 1
            longest = max(longest, n)
        extra = 0.8 * 1.5 ** (longest - 2) if longest >= 2 and token not in breakers else 0.0
        assert result[token] == pytest.approx(-extra, rel=1e-5)


def test_dry_breakers_of_several_tokens_and_window() -> None:
    logits = np.zeros((1, 9), np.float32)
    text = [1, 2, 7, 8, 1, 2, 3, 7, 8, 1, 2]
    inputs = [RowInput(history=text)]
    on = {"dry_multiplier": 1.0, "dry_base": 2.0, "dry_allowed_length": 2}
    free = dense(apply("dry", logits, neutral(**on), inputs))[0]
    assert free[3] == -4 and free[7] == -1  # repeats of 7 8 1 2, and of 1 2
    broken = dense(apply("dry", logits, neutral(**on, dry_breakers=((7, 8),)), inputs))[0]
    assert broken[3] == -1 and broken[7] == -1
    assert dense(apply("dry", logits, neutral(**on, dry_window=5), inputs))[0].tolist() == [0] * 9


def test_dry_does_not_follow_a_loop_forever() -> None:
    logits = np.zeros((1, 4), np.float32)
    settings_ = neutral(dry_multiplier=1.0, dry_base=1.75)
    result = dense(apply("dry", logits, settings_, [RowInput(history=[1] * 4000)]))[0]
    assert result[1] < -1e29 and np.isfinite(result).all()


def test_penalty_window_and_prompt() -> None:
    logits = np.ones((1, 6), np.float32)
    inputs = [RowInput(history=[1, 1, 2, 3], prompt_length=2)]

    def changed(**options: Any) -> dict[int, float]:
        result = dense(apply("frequency_penalty", logits, neutral(**options), inputs))[0]
        return {t: float(1 - x) for t, x in enumerate(result) if x != 1}

    assert changed(frequency_penalty=0.5) == {1: 1.0, 2: 0.5, 3: 0.5}
    assert changed(frequency_penalty=0.5, penalty_window=2) == {2: 0.5, 3: 0.5}
    assert changed(frequency_penalty=0.5, penalty_window=0) == {}
    assert changed(frequency_penalty=0.5, penalize_prompt=False) == {2: 0.5, 3: 0.5}


def test_tokens_beyond_the_head_are_passed_over() -> None:
    logits = random_logits(1, 1, 5)
    inputs = [RowInput(history=[99, 1, 99, 1, 99], forbidden=[77])]
    on = neutral(repetition_penalty=2, no_repeat_ngram=2, dry_multiplier=1, presence_penalty=1)
    assert 0 <= Chain(on).pick(logits, inputs)[0].token < 5


def test_forced_tokens_and_forbidden_ones() -> None:
    logits = random_logits(2, 1, 3000)
    chain = Chain(neutral(logit_bias={4: math.inf, 5: math.inf}, temperature=0.0))
    best = 4 if logits[0, 4] >= logits[0, 5] else 5
    assert chain.pick(logits)[0].token == best
    assert chain.pick(logits, [RowInput(forbidden=[best])])[0].token == 9 - best
    with pytest.raises(NoCandidateError, match="logit_bias") as caught:
        chain.pick(logits, [RowInput(forbidden=[4, 5])])
    assert caught.value.rows == (0,)
    with pytest.raises(SettingsError, match="3000"):
        Chain(neutral(logit_bias={3000: 1.0})).pick(logits)


def test_everything_forbidden_names_the_row() -> None:
    logits = random_logits(2, 3, 2)
    inputs = [RowInput(), RowInput(history=[0, 1]), RowInput()]
    chain = Chain([neutral(), neutral(no_repeat_ngram=1), neutral()])
    with pytest.raises(NoCandidateError, match="no_repeat_ngram") as caught:
        chain.pick(logits, inputs)
    assert caught.value.rows == (1,)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_bad_logits_are_refused(bad: float) -> None:
    logits = random_logits(2, 2, 2000)
    logits[1, slice(3) if np.isnan(bad) else slice(None)] = bad
    for chain in (Chain([neutral()] * 2), Chain([SamplingSettings(temperature=0)] * 2)):
        with pytest.raises(BadLogitsError) as caught:
            chain.pick(logits)
        assert caught.value.rows == (1,)


def test_infinite_logits_are_certain() -> None:
    logits = random_logits(2, 1, 2000)
    logits[0, [8, 9]] = np.inf
    logits[0, 10] = -np.inf
    pick = Chain(SamplingSettings()).pick(logits, explain=True, top=2)[0]
    assert pick.token in (8, 9)
    assert pick.logprob == pytest.approx(math.log(0.5))
    assert pick.entropy == pytest.approx(math.log(2))


def test_xtc_coin_is_tossed_at_its_rate_and_from_its_own_stream() -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], dtype=np.float32))
    on = neutral(xtc_probability=0.3, xtc_threshold=0.19, seed=5)
    dropped = 0
    for position in range(400):
        result = remaining_ids(apply("xtc", logits, on, [RowInput(position=position)]))[0]
        tossed = uniform(5, 0, position, XTC_STREAM) < 0.3
        assert result == ({2, 3} if tossed else {0, 1, 2, 3})
        dropped += tossed
    assert 80 < dropped < 160


def test_mirostat_follows_its_formula() -> None:
    tau, eta = 3.0, 0.2
    chain = Chain(SamplingSettings(temperature=1.0, mirostat_tau=tau, mirostat_eta=eta, seed=3))
    mu, state, history = 2 * tau, None, [1]
    for step in range(30):
        logits = random_logits(step, 1, 4000, 2.0)
        pick = chain.pick(logits, [RowInput(history=history, state=state)])[0]
        chances = softmax(logits)[0]
        alive = -np.log2(chances) <= mu
        chances = np.where(alive, chances, 0) / chances[alive].sum()
        assert chances[pick.token] == pytest.approx(pick.probability, rel=1e-4)
        mu -= eta * (-math.log2(chances[pick.token]) - tau)
        assert isinstance(pick.state, StageState)
        assert pick.state.mirostat_mu == pytest.approx(mu, abs=1e-3)
        state = pick.state
        history.append(pick.token)
    again = chain.pick(logits, [RowInput(history=history[:-1], state=StageState(mu))])[0]
    assert again.state is not state  # given out new, never changed in place


def test_mirostat_of_a_hopeless_mu_keeps_the_likeliest() -> None:
    logits = random_logits(0, 1, 3000)
    on = SamplingSettings(mirostat_tau=1.0)
    pick = Chain(on).pick(logits, [RowInput(state=StageState(-50.0))])[0]
    assert pick.token == logits[0].argmax()


EVERYTHING: dict[str, Any] = {
    "temperature": 0.7, "top_k": 60, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9, "eta": 0.001,
    "top_n_sigma": 2.5, "xtc_probability": 0.5, "xtc_threshold": 0.1, "repetition_penalty": 1.2,
    "frequency_penalty": 0.2, "presence_penalty": 0.1, "no_repeat_ngram": 3,
    "dry_multiplier": 0.5, "logit_bias": {3: 2.0, 5: -math.inf}, "dynatemp_range": 0.2,
    "mirostat_tau": 4.0,
}  # fmt: skip


@given(order=st.permutations(list(STAGES)), seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_any_order_of_all_stages_works(order: list[str], seed: int) -> None:
    logits = random_logits(seed, 2, 1500)
    history = np.random.default_rng(seed).integers(0, 1500, 50)
    on = SamplingSettings(**EVERYTHING, stages=tuple(order), seed=seed)
    inputs = [RowInput(history=history), RowInput(history=history[:3])]
    for pick in Chain([on, on]).pick(logits, inputs, explain=True):
        assert pick.token != 5
        assert pick.draw is not None and pick.draw.low <= pick.draw.u
        assert 0 < pick.probability <= 1
        ran = [name for name in order if name != "temperature"]
        assert [stage.name for stage in pick.stages] == ran
        assert all(stage.kept >= 1 and stage.removed >= 0 for stage in pick.stages)
