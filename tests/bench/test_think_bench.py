"""Thinking longer: the benchmark runs without a real model, its checks agree with the tasks' own
scores, and what it computes from samples is what the policies do."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

import think
import unspool
from lib.models import tiny_causal
from thinking.curves import CHOICES, ProblemSamples, Sample, curves, voting
from thinking.tasks import GYM, Problem, answer_of, gym_problems, is_right, score, turns


@pytest.fixture
def tiny_run(tmp_path: Path, run_bench):
    def run(*words: str) -> dict:
        run_bench(think, *words, "--out", tmp_path)
        return json.loads((tmp_path / "results.json").read_text())

    return run


def test_it_runs_and_resumes(tiny_run, tmp_path: Path) -> None:
    stopped = tiny_run("run", "--tiny", "--limit", "-1")
    assert stopped["models"] == {}
    result = tiny_run("run", "--tiny")
    (settings,) = result["settings"]
    assert settings["model"] == "tiny" and settings["seed"] == 1 and "--tiny" in settings["command"]
    figures = result["models"]["tiny"]["tasks"]["sums"]
    assert figures["problems"] == 3 and figures["samples"] == 4
    points = figures["curves"]
    run = {"beam by log-probability", "dvts by log-probability", "mcts by the exact check"}
    assert {"one sample", "greedy", "best-of by certainty", "budget forcing", *run} <= set(points)
    assert all(point["tokens"] > 0 for line in points.values() for point in line)
    # Every search keeps to what the samples of its problem cost.
    for line in (tmp_path / "searches" / "tiny~sums.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert 0 < row["spent"] <= 4 * 8
        assert not row["error"] or row["policy"] == "budget forcing"  # whose tags did not fit
    for picture in tmp_path.glob("*.svg"):
        ElementTree.fromstring(picture.read_text())
    assert (tmp_path / "results.md").read_text().startswith("### tiny, sums")
    before = (tmp_path / "samples" / "tiny~sums.jsonl").read_text()
    assert tiny_run("run", "--tiny") == result  # nothing is done twice
    assert (tmp_path / "samples" / "tiny~sums.jsonl").read_text() == before


def test_what_is_read_off_samples_is_what_the_policies_do(tmp_path: Path) -> None:
    lm = unspool.load(tiny_causal(tmp_path), device="cpu", progress=False)
    problem = Problem("one", turns("what comes next?"), "exact", "e", max_tokens=3)
    (texts,) = think.draw(lm, [problem], 9, 5)
    (record,) = think.record_samples(lm, [problem], [texts], [texts[:1]], 9)

    def by_length(text):  # replaces the exact check, whose scores are all 0 here
        return float(len(text.text))

    def answer(text):
        full = answer_of(problem, text.text)
        return full and full[:1]

    samples = [
        Sample(s.tokens, s.logprob, s.right, by_length(text), answer(text), s.certainty)
        for s, text in zip(record.samples, texts, strict=True)
    ]
    policies = {
        "best-of by the exact check": {"policy": "best-of", "judge": by_length},
        "best-of by log-probability": {"policy": "best-of", "judge": "logprob"},
        "best-of by certainty": {"policy": "best-of", "judge": "certainty"},
        "vote": {"policy": "vote", "extract": answer},
        "vote weighed by log-probability": {
            "policy": "vote", "judge": "logprob", "extract": answer},
        "vote weighed by certainty": {"policy": "vote", "judge": "certainty", "extract": answer},
    }  # fmt: skip
    assert set(policies) == set(CHOICES)
    for name, policy in policies.items():
        for n in (3, 9):
            selected = CHOICES[name][0](samples[:n])
            options = {**think.options_of(lm, problem, 5), **policy, "n": n, "budget": 10_000}
            text = lm.think(think.prompt_of(lm, problem), **options).text
            assert text == texts[samples.index(selected)].text, (name, n)


@pytest.mark.slow  # so is the import of the tasks
def test_checks_say_what_the_tasks_own_judges_say() -> None:
    gym = pytest.importorskip("reasoning_gym")
    for name, (task, check, _, _, settings) in GYM.items():
        judge = gym.create_dataset(task, size=1, seed=0, **settings)
        entries = gym.create_dataset(task, size=96, seed=2026, **settings)
        by_question = {entry["question"].strip(): entry for entry in entries}
        for problem in gym_problems(name, 12):
            entry = by_question[problem.messages[-1]["content"]]
            # Of sums the last number is taken, so here only answers that are nothing else.
            others = ["7", "", "))", *(["1 + 2 * 3"] if check != "number" else [])]
            for answer in [entry["answer"], f" {entry['answer']}\n", *others]:
                right = judge.score_answer(answer.strip(), entry) >= 1.0
                assert is_right(problem, answer) == right, (name, answer)


@pytest.mark.parametrize(
    ("text", "right"),
    [("3*(4+5)", True), ("5*3 + 4*3", False), ("3*9", False), ("27", False), ("4+5)*3", False),
     ("(5 + 4)*3", True), ("9**9**9", False), ("-3*(-4-5)", True), ("5 * 3 / 0", False)],
)  # fmt: skip
def test_countdown_counts_its_numbers(text: str, right: bool) -> None:
    data = {"numbers": [3, 4, 5], "target": 27}
    assert is_right(Problem("one", [], "countdown", data=data), text) == right


def test_numbers_are_found_where_answers_give_them() -> None:
    problem = Problem("one", [], "number")
    assert answer_of(problem, "16 - 3 = 13. So the answer is $1,234.00 of 2000.") == "1234"
    assert answer_of(problem, "first 3, then -4") == "-4"
    assert answer_of(problem, "none") is None


@pytest.mark.slow  # so is the import of the checkers
def test_instructions_are_checked() -> None:
    pytest.importorskip("if_verifiable")
    data = {"prompt": "", "instructions": ["punctuation:no_comma", "change_case:english_lowercase"],
            "kwargs": [{}, {}]}  # fmt: skip
    problem = Problem("one", [], "ifeval", data=data)
    assert score(problem, "a quiet evening by the sea") == 1.0
    assert score(problem, "a quiet evening, by the sea") == 0.5
    assert score(problem, " ") == 0.0


def test_points_and_the_plot_of_votes() -> None:
    def problem(number: int, rights: list[bool]) -> ProblemSamples:
        samples = [
            Sample(2, -float(k), right, float(right), "yes" if right else "no", 1.0 + k)
            for k, right in enumerate(rights)
        ]
        return ProblemSamples(str(number), 10, samples, samples[0])

    often = [True, True, False, True] * 8  # the right answer is the usual one: votes help
    seldom = [False, True, False, False] * 8  # ... and the seldom one: votes hurt
    problems = [problem(n, often) for n in range(6)] + [problem(6 + n, seldom) for n in range(6)]
    result = curves(problems, [])
    assert result["one sample"][0]["accuracy"] == pytest.approx(0.5)
    vote = {point["n"]: point for point in result["vote"]}
    assert vote[4]["accuracy"] == 0.5 and vote[4]["tokens"] == 8 and vote[4]["runs"] == 8
    checked = {point["n"]: point for point in result["best-of by the exact check"]}
    assert checked[4]["accuracy"] == 1.0 and checked[4]["gain"] == pytest.approx(0.5)
    assert result["best-of by certainty"][0]["tokens"] == 2 * 2 * 2  # written, and read again
    low, high = voting(problems)["bins"]
    assert low["right"] == 0.25 and [gain["gain"] for gain in low["gains"]] == [-0.25, -0.25]
    assert high["right"] == 0.75 and [gain["gain"] for gain in high["gains"]] == [0.25, 0.25]
