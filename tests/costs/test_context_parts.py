"""Error propagation, long context and exposure bias, checked against values computed by hand."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unspool
from unspool.costs.part import MeasurementPlan
from unspool.costs.parts import exposure, fading, snowball
from unspool.costs.parts.exposure import LENGTH, LETTERS, MarkovSource, trained_model
from unspool.costs.parts.fading import load_with_window, truncate_context, truncate_with_sinks
from unspool.costs.texts import excerpts, last_logits, token_nlls


def by_score(lm: Any, text: list[int], last: int) -> list[float]:
    return [-position.logprob for position in lm.score(text).positions[-last:]]


def test_surprises_are_what_scoring_says(small: Any, texts: list[str]):
    some = excerpts(small, texts, 9, 40)
    result = token_nlls(small, [text[: 20 + n] for n, text in enumerate(some)], 7)
    for number, text in enumerate(some):
        assert result[number] == pytest.approx(by_score(small, text[: 20 + number], 7), abs=2e-3)


# -- snowball -------------------------------------------------------------------------------


def test_a_slip_is_the_likeliest_other_token(small: Any, texts: list[str]):
    some = excerpts(small, texts, 3, 145)
    for text, slip in zip(some, snowball.find_errors(small, some, 64), strict=True):
        right, wrong = slip.texts()
        changed = [n for n, (a, b) in enumerate(zip(right, wrong, strict=True)) if a != b]
        assert right == text[: slip.position + 65] and changed == [slip.position]
        (logits,) = last_logits(small, [text[: slip.position + 1]], 1)
        order = np.argsort(-np.asarray(logits[0]))
        assert slip.wrong == next(int(token) for token in order if token != text[slip.position])
    costs = snowball.excess(small, snowball.find_errors(small, some, 64))
    clean, slipped = (by_score(small, variant, 64) for variant in slip.texts())
    assert costs[-1] == pytest.approx(np.subtract(slipped, clean), abs=4e-3)


def test_a_short_context_is_enough(small_folder: Path, texts: list[str]):
    with unspool.load(small_folder, memory=32 << 20, context=80) as lm:
        plan = MeasurementPlan(True, 0, texts)
        part = snowball.measure(lm, plan)
        assert "for the next 31" in part.figure("area").why
        assert fading.measure(lm, plan).figure("effective length").value is not None


def test_half_life_is_where_half_of_the_area_is_reached():
    decay = np.exp(-math.log(2) / 5 * np.arange(200))[None]  # it halves every five tokens
    assert snowball.half_life(decay) == 5
    assert snowball.half_life(np.array([[4.0, 0, 0], [2, 1, 1]])) == 1
    assert math.isnan(snowball.half_life(np.array([[1.0, -2.0]])))


def test_new_runs_by_hand():
    assert snowball.new_runs([*range(20)], 5) == 1
    assert snowball.new_runs([1, 2, 3, 4, 9, 1, 2, 3, 4], 1) == 0
    assert snowball.new_runs([1, 2, 3, 4, 5, 1, 2, 3, 4, 6], 2) == 0.5
    assert snowball.new_runs([7] * 10, 6) == 0


# -- the fading context ---------------------------------------------------------------------


def test_views_by_hand():
    text = [*range(20)]
    assert truncate_context(text, 3, 4) == [13, 14, 15, 16, 17, 18, 19]
    assert truncate_context(text, 3, 17) == truncate_context(text, 3, 99) == text
    assert truncate_context(text, 3, 5, num_sinks=2) == [0, 1, 14, 15, 16, 17, 18, 19]
    assert truncate_with_sinks(text, 3, 6) == [0, 1, 2, 14, 15, 16, 17, 18, 19]


def test_a_model_with_a_window_is_that_model(small: Any, texts: list[str], tmp_path: Path):
    """The same weights under a name that has such a window, which is tested elsewhere."""
    folder = shutil.copytree(small.path, tmp_path / "windowed")
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=9)
    (folder / "config.json").write_text(json.dumps(config))
    some = excerpts(small, texts, 2, 60)
    narrow = load_with_window(small, 9)
    assert not isinstance(narrow, str)
    with narrow, unspool.load(folder, memory=32 << 20) as mistral:
        result = token_nlls(narrow, some, 30)
        assert result == pytest.approx(token_nlls(mistral, some, 30), abs=2e-3)
        assert np.abs(result - token_nlls(small, some, 30)).max() > 0.01, "the window has no effect"
        assert token_nlls(narrow, [some[0][:9]], 4) == pytest.approx(
            token_nlls(small, [some[0][:9]], 4), abs=2e-3
        )


def test_a_needle_is_at_its_depth(small: Any, texts: list[str]):
    (straw,) = excerpts(small, texts, 1, 300)
    for depth in (0.0, 0.5, 1.0):
        text, answer = fading.insert_needle(small, straw, 200, depth, "Oslo", " 4711")
        assert 190 <= len(text) <= 200 and text[-len(answer) :] == answer
        assert text[0] == straw[0]
        decoded = small.tokenizer.decode(text)
        assert decoded.endswith("\n\nThe secret number of Oslo is 4711")
        assert decoded.count("The secret number of Oslo is 4711") == 2
        at = decoded.index("The secret number") / len(decoded)
        assert abs(at - 0.8 * depth) < 0.2


def test_effective_length_by_hand():
    losses = np.array([[4.0, 3.0, 2.06, 2.0], [4.0, 3.0, 2.0, 2.0]])
    assert fading.effective_length(losses, [8, 16, 32, 64]) == 32
    assert fading.effective_length(losses + np.array([0, 0, 0.1, 0]), [8, 16, 32, 64]) == 64


# -- exposure bias --------------------------------------------------------------------------


def test_the_source_draws_what_its_table_says():
    source = MarkovSource(3)
    assert source.probabilities.sum(2) == pytest.approx(np.ones((16, 16)))
    texts = source.texts(4000, np.random.default_rng(0))
    assert texts.shape == (4000, LENGTH) and (texts[:, :2] < 8).all()
    assert 0 < (texts >= 8).mean() < 0.05, "it hardly ever turns to the other half"
    pair = (texts[:, 2] * 16 + texts[:, 3]).tolist()
    common = max(set(pair), key=pair.count)
    letters = texts[np.array(pair) == common, 4]
    shares = np.bincount(letters, minlength=16) / len(letters)
    error = np.abs(shares - source.probabilities[common // 16, common % 16]).max()
    assert error < 5 / math.sqrt(len(letters))


def test_the_errors_are_divergences_from_the_true_chances():
    source = MarkovSource(0)
    texts = source.texts(5, np.random.default_rng(1))
    exact = np.log(source.probabilities[texts[:, :-2], texts[:, 1:-1]])
    assert source.errors(texts, exact) == pytest.approx(np.zeros((5, LENGTH - 2)), abs=1e-12)
    even = np.full_like(exact, -math.log(len(LETTERS)))
    true = source.probabilities[texts[2, 10], texts[2, 11]]
    by_hand = sum(p * math.log(p * len(LETTERS)) for p in true)
    assert source.errors(texts, even)[2, 10] == pytest.approx(by_hand)


def test_excess_accumulated_error_is_the_formula():
    random = np.random.default_rng(0)
    after_source, after_model = random.random((6, 9)), 1.5 * random.random((6, 9))
    errors = exposure.StepErrors(after_source, after_model, np.zeros((6, 11), np.int64))
    for length in (1, 4, 9):
        epsilon = after_source[:, :length].sum() / 6 / length
        regret = after_model[:, :length].sum() / 6
        expected = (regret - length * epsilon) / (length * epsilon)
        assert errors.excess()[length - 1] == pytest.approx(expected)
    low, high = errors.interval()
    assert (low <= errors.excess()).all() and (errors.excess() <= high).all()


def test_small_models_are_trained_once_and_measured_exactly(small: Any):
    source = MarkovSource(0)
    folder = trained_model(source, scheduled_sampling=0.5)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert trained_model(source, scheduled_sampling=0.5) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    with unspool.load(folder, memory=32 << 20) as lm:
        errors = exposure.measure_errors(lm, source, 6, temperature=1.0)
        assert errors.after_model.shape == errors.after_source.shape == (6, LENGTH - 2)
        text = errors.model_texts[3].tolist()
        scored = lm.score(text, top=len(LETTERS)).positions[20]
        model = {candidate.token: candidate.logprob for candidate in scored.candidates}
        true = source.probabilities[text[18], text[19]]
        by_hand = sum(p * (math.log(p) - model[token]) for token, p in enumerate(true))
        assert errors.after_model[3, 18] == pytest.approx(by_hand, abs=1e-3)
    part = exposure.measure(small, MeasurementPlan(False, 0, ()))
    assert len(part.figures) == 3 * len(exposure.TRAININGS)
