"""The chain: rows do not touch each other, looking changes nothing, and what it tells is so."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.sampling_support import CHAINS, neutral, random_logits, softmax
from unspool.errors import SettingsError
from unspool.sampling import Chain, Pick, RowInput, SamplingSettings, log_softmax, score

WIDTH = 3000
HISTORY = np.random.default_rng(0).integers(0, WIDTH, 200)
KINDS = [SamplingSettings(seed=seed, **options) for seed, options in enumerate(CHAINS)]


def inputs(count: int) -> list[RowInput]:
    return [RowInput(history=HISTORY[: 20 + 7 * n], prompt_length=5) for n in range(count)]


@given(
    chain_numbers=st.lists(st.sampled_from(range(len(KINDS))), min_size=1, max_size=8),
    seed=st.integers(0, 500),
    kind=st.sampled_from(["numpy", "torch"]),
)
@settings(max_examples=30, deadline=None)
def test_a_row_is_picked_alone_as_in_any_batch(
    chain_numbers: list[int], seed: int, kind: str
) -> None:
    logits: Any = random_logits(seed, len(chain_numbers), WIDTH, 0.5 + seed % 4)
    logits = torch.from_numpy(logits) if kind == "torch" else logits
    row_inputs = inputs(len(chain_numbers))
    together = Chain([KINDS[n] for n in chain_numbers]).pick(logits, row_inputs, top=3)
    for row, number in enumerate(chain_numbers):
        alone = Chain(KINDS[number]).pick(logits[row : row + 1], [row_inputs[row]], top=3)[0]
        assert alone == together[row]  # every number, bit for bit


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_looking_changes_nothing(number: int) -> None:
    logits = random_logits(number, 2, WIDTH)
    chain = Chain([KINDS[number]] * 2)
    copy = logits.copy()
    plain = chain.pick(logits, inputs(2))
    looked = chain.pick(logits, inputs(2), top=7, explain=True)
    assert [dataclasses.replace(p, candidates=(), stages=()) for p in looked] == plain
    assert (logits == copy).all()
    assert plain[0].candidates == () and plain[0].stages == ()


def close(a: Pick, b: Pick) -> bool:
    numbers = [(p.logprob, p.entropy, p.probability) for p in (a, b)]
    return a.token == b.token and a.rank == b.rank and bool(np.allclose(*numbers, atol=1e-5))


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_numpy_and_torch_pick_alike(number: int) -> None:
    logits = random_logits(number, 4, WIDTH, 0.5 + number % 3)
    logits[1] = np.round(logits[1], 1)  # equals: the lower id comes first in both
    chain = Chain([KINDS[number]] * 4)
    for a, b in zip(
        chain.pick(logits, inputs(4), top=5, explain=True),
        chain.pick(torch.from_numpy(logits), inputs(4), top=5, explain=True),
        strict=True,
    ):
        assert close(a, b)
        assert [c.token for c in a.candidates] == [c.token for c in b.candidates]
        assert [(s.name, s.kept, s.removed) for s in a.stages] == [
            (s.name, s.kept, s.removed) for s in b.stages
        ]


def test_half_precision_and_gradients_are_taken() -> None:
    logits = torch.randn(1, 500, requires_grad=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert 0 <= Chain(SamplingSettings()).pick(logits.to(dtype))[0].token < 500
    assert Chain(SamplingSettings()).pick(np.zeros((1, 9), np.float16))[0].token < 9


def test_greedy_takes_the_likeliest_after_edits_lowest_id_of_equals() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 2.0]], dtype=np.float32)
    chain = Chain(SamplingSettings(temperature=0))
    pick = chain.pick(logits)[0]
    assert (pick.token, pick.rank, pick.draw, pick.probability) == (1, 0, None, 1.0)
    assert Chain(SamplingSettings(temperature=0, top_k=0)).pick(torch.tensor(logits))[0].token == 1
    biased = Chain(SamplingSettings(temperature=0, logit_bias={3: 2.0})).pick(logits, explain=True)
    assert biased[0].token == 3 and biased[0].rank == 2
    assert [stage.name for stage in biased[0].stages] == ["logit_bias", "greedy"]
    assert biased[0].stages[-1].kept == 1


def test_the_numbers_of_a_pick_are_the_models_own() -> None:
    logits = random_logits(4, 3, WIDTH)
    for row, pick in enumerate(Chain([SamplingSettings(seed=n) for n in range(3)]).pick(logits)):
        chances = softmax(logits)[row]
        assert pick.logprob == pytest.approx(math.log(chances[pick.token]), abs=1e-5)
        assert pick.rank == (logits[row] > logits[row][pick.token]).sum()
        assert pick.entropy == pytest.approx(-(chances * np.log(chances)).sum(), abs=1e-4)


def test_the_report_is_honest() -> None:
    logits = random_logits(9, 1, WIDTH, 1.0)
    on = SamplingSettings(top_k=50, top_p=0.6, temperature=0.5, presence_penalty=1.0, seed=4)
    pick = Chain(on).pick(logits, [RowInput(history=[3, 3, 4])], top=100, explain=True)[0]
    reports = {stage.name: stage for stage in pick.stages}
    assert list(reports) == ["presence_penalty", "top_k", "top_p", "min_p", "temperature"]
    edited = logits[0].astype(np.float64)
    edited[[3, 4]] -= 1
    chances = softmax(edited)
    best = np.sort(chances)[::-1]
    assert reports["presence_penalty"].changed == 2
    assert reports["presence_penalty"].kept == WIDTH
    assert reports["top_k"].kept == 50 and reports["top_k"].removed == WIDTH - 50
    assert reports["top_k"].kept_mass == pytest.approx(best[:50].sum(), rel=1e-4)
    assert reports["top_p"].kept_mass >= 0.6 > 0
    assert reports["top_p"].top[0][0] == int(chances.argmax())
    assert reports["temperature"].removed == 0
    num_kept = reports["temperature"].kept
    assert sum(c.probability > 0 for c in pick.candidates) == num_kept
    assert sum(c.probability for c in pick.candidates) == pytest.approx(1.0)
    mine = next(c for c in pick.candidates if c.token == pick.token)
    assert mine.probability == pytest.approx(pick.probability, rel=1e-9)
    assert mine.logprob == pytest.approx(pick.logprob)
    assert pick.draw is not None and pick.draw.low <= pick.draw.u < pick.draw.high
    assert pick.draw.high - pick.draw.low == pytest.approx(pick.probability)


def test_a_report_of_all_kept_in_another_order() -> None:
    report = Chain(neutral(top_k=WIDTH)).pick(random_logits(3, 1, WIDTH), explain=True)[0].stages[0]
    assert (report.kept, report.removed, report.changed, report.kept_mass) == (WIDTH, 0, 0, 1.0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SettingsError, match="2 rows"):
        Chain([SamplingSettings()] * 2).pick(np.zeros((3, 10), np.float32))
    with pytest.raises(SettingsError, match="row inputs"):
        Chain(SamplingSettings()).pick(np.zeros((1, 10), np.float32), [])
    with pytest.raises(TypeError, match="numpy"):
        Chain(SamplingSettings()).pick([[1.0]])


def test_one_token_vocabulary_and_extreme_temperatures() -> None:
    assert Chain(SamplingSettings(repetition_penalty=2)).pick(np.zeros((1, 1)))[0].token == 0
    logits = random_logits(0, 1, WIDTH)
    assert Chain(neutral(temperature=1e-300)).pick(logits)[0].token == logits.argmax()
    hot = Chain(neutral(temperature=1e300)).pick(logits)[0]
    assert hot.probability == pytest.approx(1 / WIDTH, rel=1e-3)


def test_scores_match_torch() -> None:
    logits = random_logits(0, 150, 5000, 4.0)
    targets = np.random.default_rng(1).integers(0, 5000, 150)
    expected = torch.from_numpy(logits).double().log_softmax(-1)
    for array in (logits, torch.from_numpy(logits)):
        scores = score(array, targets, top=4)
        assert np.allclose(scores.logprobs, expected[np.arange(150), targets], atol=1e-5)
        best = expected.topk(4)
        assert (scores.top_tokens == best.indices.numpy()).all()
        assert np.allclose(scores.top_logprobs, best.values, atol=1e-5)
        assert (scores.ranks == (logits > logits[np.arange(150), targets][:, None]).sum(1)).all()
        assert np.allclose(np.asarray(log_softmax(array)), expected, atol=1e-5)
    with pytest.raises(SettingsError, match="vocabulary"):
        score(logits, [5000] * 150)
    with pytest.raises(SettingsError, match="targets"):
        score(logits, [1])
    assert score(logits[:0], []).logprobs.shape == (0,)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, numpy, unspool.sampling as s;"
        "s.Chain(s.SamplingSettings()).pick(numpy.zeros((1, 9)));"
        "assert not {'torch', 'scipy', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
