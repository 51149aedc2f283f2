"""The computations of the parts, against values computed by hand."""

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
from unspool.costs.parts import confidence, exposure, fading, loops, remedies, snowball, whole
from unspool.costs.parts.confidence import load_items
from unspool.costs.parts.exposure import LENGTH, LETTERS, MarkovSource, trained_model
from unspool.costs.parts.fading import load_with_window, truncate_context, truncate_with_sinks
from unspool.costs.parts.remedies import POLICIES, Sum, SumResult, answer_sums, make_sums
from unspool.costs.parts.waiting import (
    TimeSplit,
    bandwidth,
    bytes_per_token,
    measure_drafts,
    weight_bytes,
)
from unspool.costs.parts.whole import make_stories
from unspool.costs.texts import (
    distinct_n,
    encode_with_start,
    excerpts,
    generate_batch,
    last_logits,
    token_nlls,
)


@pytest.mark.parametrize(
    ("tokens", "period"),
    [
        ([7] * 13, 1),
        ([7] * 12, None),  # a dozen must repeat the one before
        ([9, 9, 9, *[1, 2, 3] * 5], 3),
        ([1, 2, 3] * 4 + [4], None),  # it got out
        (list(range(16)) * 3, 16),
        (list(range(17)) * 4, None),  # too long a period
        ([*range(100)], None),
        ([], None),
    ],
)
def test_a_text_ends_in_a_period(tokens: list[int], period: int | None):
    assert loops.loop_period(tokens) == period


def test_loops_and_variety_by_hand():
    assert loops.loop_start([8, 8, 1, 2, 3, 1, 2, 3, 1, 2], 3) == 2
    assert loops.loop_start([5] * 20, 1) == 0
    assert distinct_n([[1, 2, 3], [1, 2, 4]]) == pytest.approx(3 / 4)
    assert np.isnan(distinct_n([[1]]))


def test_calibration_by_hand():
    # Two bins: 0.9, 0.9 (one right: gap 0.4), and 0.55 (right: gap 0.45).
    sure, right = [0.9, 0.9, 0.55], [1, 0, 1]
    expected = 2 / 3 * 0.4 + 1 / 3 * 0.45
    assert confidence.expected_calibration_error(sure, right) == pytest.approx(expected)
    assert confidence.expected_calibration_error([1.0, 1.0], [1, 1]) == 0
    x, hits = confidence.reliability(sure, right)
    assert x == pytest.approx([0.55, 0.9]) and hits == [[1.0], [1.0, 0.0]]
    random = np.random.default_rng(0)
    calibrated = random.uniform(size=200_000)
    right_answers = random.uniform(size=calibrated.size) < calibrated
    assert confidence.expected_calibration_error(calibrated, right_answers) < 0.01
    table = [[1, 0, 0, 0], [0, 1, 0, 0], [0.25] * 4]
    assert confidence.brier(table, [0, 0, 0]).tolist() == pytest.approx([0, 2, 0.75])


def test_belief_in_answers_is_what_scoring_says(small: Any):
    questions = load_items()[:2]
    table = confidence.item_probabilities(small, questions)
    assert table.shape == (2, 4) and table.sum(1) == pytest.approx([1, 1])
    context = encode_with_start(small, f"Question: {questions[1].question}\nAnswer:")
    totals = []
    for answer in questions[1].answers:
        ids = [*context, *small.tokenizer.encode(f" {answer}")]
        score = small.score(ids)
        totals.append(sum(position.logprob for position in score.positions[len(context) :]))
    expected = np.exp(totals - np.max(totals))
    assert table[1] == pytest.approx(expected / expected.sum(), abs=1e-3)


def test_items_are_what_they_say():
    every = load_items()
    assert len(every) == len({item.question for item in every}) >= 60
    assert all(len(item.answers) == len(set(item.answers)) == 4 for item in every)


def test_swaps_change_two_sentences_and_nothing_else(texts: list[str]):
    swaps = whole.swaps(texts, 12, (1, 2), seed=0)
    assert len(swaps) == 12 and {swap.distance for swap in swaps} == {1, 2}
    for swap in swaps:
        assert swap.original != swap.swapped and sorted(swap.sentences) == sorted(swap.order())
        assert swap.order()[0] == swap.sentences[0] and swap.order()[-1] == swap.sentences[-1]
        assert sum(a != b for a, b in zip(swap.order(), swap.sentences, strict=True)) == 2
    assert swaps == whole.swaps(texts, 12, (1, 2), seed=0)


def test_swap_figures_by_hand():
    originals = [np.array([-1.0, -1.0]), np.array([-3.0, -1.0])]
    swapped = [np.array([-2.0, -2.0]), np.array([-1.0, -1.0])]
    noticed, area = whole._swap_figures([*originals, *swapped], 2, "the model")
    assert noticed.value == 0.5 and noticed.n == 2
    # means: -1 and -2 against -2 and -1: pairs (1 > ., = half) by Mann-Whitney
    assert area.value == pytest.approx((1 + 0.5 + 0.5 + 0) / 4)


class _Masked:
    """A masked model whose prediction depends on the position only."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.mask_id, self.rows = tokenizer, 511, list[list[int]]()

    def logits(self, row: list[int]) -> Any:
        self.rows.append(row)
        return np.random.default_rng(0).normal(size=(400, 512)).astype(np.float32)[: len(row)]


def test_a_masked_twin_hides_every_token_once(small: Any):
    twin = _Masked(small.tokenizer)
    text = "The scheduler plans rows, and the batch builder makes a step of them."
    (logprobs,) = whole.masked_likelihoods(twin, [text], lambda done: None)
    ids = small.tokenizer.encode(text)
    hidden = [at for row in twin.rows for at, token in enumerate(row) if token == 511]
    assert sorted(hidden) == list(range(len(ids))) and len(twin.rows) == 8
    logits = twin.logits(ids).astype(np.float64)
    logits[:, [511, *small.tokenizer.special_ids]] = -np.inf
    expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert logprobs == pytest.approx(expected[np.arange(len(ids)), ids], abs=1e-4)


def test_with_a_twin_there_are_its_figures(small: Any, texts: list[str]):
    part = whole.measure(small, MeasurementPlan(True, 0, texts, twin=_Masked(small.tokenizer)))
    assert part.figure("swap noticed by the masked model").n == 4
    assert part.figure("AUC of the masked model").value is not None


def test_every_story_can_be_checked():
    every = make_stories(0)
    assert len(every) == 48
    for story in every:
        assert story.answer in story.values and f" {story.answer}" in story.beginning
        assert len(set(story.values)) == 4
        others = [value for value in story.values if value != story.answer]
        assert not any(f" {value} " in story.beginning for value in others)
    answers = [story.answer for story in every]
    assert {answers.count(value) for value in every[0].values} == {2}  # each equally often


def test_a_story_contradicted(small: Any, monkeypatch: pytest.MonkeyPatch):
    from unspool.train.evaluation.bits_per_byte import Likelihood

    selected = make_stories(0)[:3]

    def always_the_first(lm: Any, pairs: Any) -> list[Likelihood]:
        return [Likelihood((0.0 if number % 4 == 0 else -9.0,), True) for number in range(12)]

    monkeypatch.setattr(whole, "score_continuations", always_the_first)
    started = [encode_with_start(small, story.beginning) for story in selected]
    wrong = whole.contradictions(small, selected, started)
    assert wrong == [story.answer != story.values[0] for story in selected]


def test_excerpts_are_human_text_and_no_two_alike(small: Any, texts: list[str]):
    result = excerpts(small, texts, 8, 40)
    assert len(result) == 8 and all(len(ids) == 40 for ids in result)
    assert len({tuple(ids) for ids in result}) == 8
    written = small.tokenizer.decode(result[0], specials=False)
    assert texts[0].startswith(written.strip("�"))
    with pytest.raises(ValueError, match="give longer texts"):
        excerpts(small, ["short"], 2, 300)


def test_writing_counts_tokens_that_a_guard_removed(small: Any, texts: list[str]):
    prompts = excerpts(small, texts, 2, 24)
    plain = generate_batch(small, prompts, max_tokens=40, temperature=0.0, end=False)
    assert plain.computed == plain.num_kept == 80
    assert plain.mean_logprobs()[0] == pytest.approx(
        np.mean([step.logprob for step in plain.texts[0].steps])
    )
    banned = plain.texts[0].text.split()[-1]
    guarded = generate_batch(
        small, prompts, max_tokens=40, temperature=0.0, end=False, guard=[f"ban={banned}"]
    )
    assert guarded.computed >= guarded.num_kept


def test_bytes_of_a_token(small: Any):
    config = small.config
    heads = 2 * config.heads + 2 * config.kv_heads  # queries and outputs, keys and values
    layer = config.width * (heads * config.head_width + 3 * config.ff_width)
    matrices = config.layers * layer + config.vocab_size * config.width
    read = weight_bytes(small)
    assert matrices <= read <= 4.6 * matrices  # 1 to 4 bytes a weight, and what fills rows up
    backend = small.engine.backend
    a_page = bytes_per_token(small, backend.page_size) - read
    assert a_page == backend.page_bytes


def test_a_split_adds_up():
    split = TimeSplit(64, 10.0, 6.0, 2.0, 0.5, 16, True)
    assert [row[1] for row in split.rows()] == [6.0, 2.0, 0.5, 1.5]
    hidden = TimeSplit(64, 10.0, None, 2.0, None, 16, False)
    assert [row[1] for row in hidden.rows()] == [None, 2.0, None, 8.0]


def test_sums_are_right():
    assert len(set(make_sums(20))) == 20
    problem = Sum(4, 5)
    assert problem.prompt().endswith("Q: What is 4 + 5?\nA: 4 + 5 =")
    assert problem.prompt(thinking=True).endswith("Q: What is 4 + 5?\nA:")
    for text in (" 9", " 9\n\nQ: What is 1 + 1?", "<think>\nit is 8</think> 4 + 5 = 9", "it is 9."):
        assert problem.is_right(text), text
    for text in ("", "9</think>", " 90", "four", "9</think> 4 + 5 = 8\n9"):
        assert not problem.is_right(text), text


@pytest.mark.parametrize("name", POLICIES)
def test_each_way_of_answering_is_counted(small: Any, name: str):
    result = answer_sums(small, name, make_sums(2), seed=1)
    texts = POLICIES[name].get("n", 1)
    assert result.count == 2 and result.tokens >= 2 * texts and result.seconds > 0
    if "judge" not in POLICIES[name]:  # removed reasoning was computed too
        assert result.tokens <= 2 * texts * 2 * POLICIES[name].get("max_tokens", 6)


def test_the_cost_of_an_answer_by_hand():
    usual = SumResult("one sample", 1, 4, 24, 2.0)
    voted = SumResult("vote of 5", 3, 4, 120, 5.0).figure(usual)
    assert voted.value == 0.75 and voted.n == 4
    assert voted.why.startswith("30 tokens and 1.25 s per sum: 5.0× and 2.5× those of one sample")


def test_searches_count_what_they_computed(small: Any, texts: list[str]):
    job = remedies._RemedyJob(small, excerpts(small, texts, 2, 24), 8, 0, None, 1, 1)
    options = remedies._options(job, quick=False)
    results = {name: options[name](name) for name in ("restarts", "step-wise beam", "DVTS")}
    assert all(result.is_sampled and result.num_kept == 16 for result in results.values())
    assert results["restarts"].computed == 2 * (4 * 2 + 6), "four starts of two, one continues"
    assert results["step-wise beam"].computed == results["DVTS"].computed == 2 * 4 * 8


def test_a_remedy_beside_greedy_by_hand():
    usual = remedies.RemedyOutcome("greedy", [[1, 2, 3, 4]], [-1.0], 4, 2.0)
    searched = remedies.RemedyOutcome("beams 4", [[1, 2, 1, 2]], [-0.5], 16, 6.0)
    assert searched.row(usual) == ["beams 4", "-0.50", "0%", "0%", "67%", "4.00×", "3.00×"]
    assert usual.row(usual)[-2:] == ["1.00×", "1.00×"]
    gain = remedies._gain(usual, searched)
    assert gain.value == pytest.approx(0.5) and gain.unit == "nats/token"


def test_what_a_remedy_costs_in_likelihood(small: Any, texts: list[str]):
    prompts = excerpts(small, texts, 3, 24)
    runs = [
        loops._LoopRun(
            name, generate_batch(small, prompts, max_tokens=24, temperature=0.0, **options)
        )
        for name, options in {"greedy": {}, "dry": {"dry_multiplier": 0.8}}.items()
    ]
    cost = loops._likelihood_cost(*runs)
    before, after = (np.array(run.written.mean_logprobs()) for run in runs)
    assert cost.value == pytest.approx(float((before - after).mean())) and cost.n == 3


def test_drafts_write_the_same_text(small: Any, texts: list[str]):
    ids = excerpts(small, texts, 1, 65)[0]
    results = measure_drafts(small, ids, rounds=1, tokens=32)
    names = [result.name for result in results]
    assert names == ["lookup drafts, free text", "lookup drafts, copying"]
    for result in results:
        plain = small.generate(result.text.prompt, max_tokens=32, temperature=0.0, end=False)
        assert result.text.tokens == plain.tokens
        accepted = sum(step.draft == "accepted" for step in result.text.steps)
        assert result.accepted == accepted / 32 and result.savings[0] > 0


def test_memory_is_read_at_some_speed(small: Any):
    assert all(speed > 1e8 for speed in bandwidth(small, repeat=2))


# -- Error propagation ----------------------------------------------------------------------------


def by_score(lm: Any, text: list[int], last: int) -> list[float]:
    return [-position.logprob for position in lm.score(text).positions[-last:]]


def test_surprises_are_what_scoring_says(small: Any, texts: list[str]):
    some = excerpts(small, texts, 9, 40)
    result = token_nlls(small, [text[: 20 + n] for n, text in enumerate(some)], 7)
    for number, text in enumerate(some):
        assert result[number] == pytest.approx(by_score(small, text[: 20 + number], 7), abs=2e-3)


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
