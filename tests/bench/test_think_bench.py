"""The bench of thinking longer: it runs without a real model, its checks are those of the tasks'
own judges, and what it reads off samples is what the policies do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.fixture
def tiny_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import think

    def run(*given: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["bench/think.py", *given, "--out", str(tmp_path)])
        think.main()
        return json.loads((tmp_path / "results.json").read_text())

    return run


def test_it_runs_is_broken_off_and_goes_on(tiny_run, tmp_path: Path) -> None:
    stopped = tiny_run("run", "--tiny", "--limit", "-1")
    assert stopped["models"] == {}
    found = tiny_run("run", "--tiny")
    (settings,) = found["settings"]
    assert settings["model"] == "tiny" and settings["seed"] == 1 and "--tiny" in settings["command"]
    told = found["models"]["tiny"]["tasks"]["sums"]
    assert told["problems"] == 3 and told["samples"] == 4
    curves = told["curves"]
    run = {"beam by log-probability", "dvts by log-probability", "mcts by the exact check"}
    assert {"one sample", "greedy", "best-of by certainty", "budget forcing", *run} <= set(curves)
    assert all(point["tokens"] > 0 for points in curves.values() for point in points)
    # Every search keeps to what the samples of its problem cost.
    for line in (tmp_path / "searches" / "tiny~sums.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert 0 < row["spent"] <= 4 * 8
        assert not row["error"] or row["policy"] == "budget forcing"  # whose tags did not fit
    for picture in tmp_path.glob("*.svg"):
        ElementTree.fromstring(picture.read_text())
    assert (tmp_path / "results.md").read_text().startswith("### tiny, sums")
    before = (tmp_path / "samples" / "tiny~sums.jsonl").read_text()
    assert tiny_run("run", "--tiny") == found  # nothing is done twice
    assert (tmp_path / "samples" / "tiny~sums.jsonl").read_text() == before


def test_what_is_read_off_samples_is_what_the_policies_do(tmp_path: Path) -> None:
    import unspool
    from thinking.asking import drawn, options_of, prompt_of
    from thinking.checks import answer_of
    from thinking.records import CHOICES
    from thinking.samples import _certainties, _kept
    from thinking.tasks import Problem, turns
    from twins.models import tiny_causal

    lm = unspool.load(tiny_causal(tmp_path), device="cpu", progress=False)
    problem = Problem("one", turns("what comes next?"), "exact", "e", max_tokens=3)
    (texts,) = drawn(lm, [problem], 9, 5)
    kept = _kept(lm, problem, texts, texts[0], _certainties(lm, texts)).samples

    def by_length(text):  # stands for the exact check, whose scores are all 0 here
        return float(len(text.text))

    def answer(text):
        found = answer_of(problem, text.text)
        return found and found[:1]

    kept = [
        type(one)(one.tokens, one.logprob, one.right, by_length(text), answer(text), one.certainty)
        for one, text in zip(kept, texts, strict=True)
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
    for name, given in policies.items():
        for n in (3, 9):
            chosen = CHOICES[name][0](kept[:n])
            asked = {**options_of(lm, problem, 5), **given, "n": n, "budget": 10_000}
            thought = lm.think(prompt_of(lm, problem), **asked)
            assert thought.text == texts[kept.index(chosen)].text, (name, n)


def test_checks_say_what_the_tasks_own_judges_say() -> None:
    gym = pytest.importorskip("reasoning_gym")
    from thinking.checks import is_right
    from thinking.tasks import GYM, gym_problems

    for name, task in GYM.items():
        judge = gym.create_dataset(task.name, size=1, seed=0, **task.settings)
        entries = gym.create_dataset(task.name, size=800, seed=2026, **task.settings)
        asked = {entry["question"].strip(): entry for entry in entries}
        for problem in gym_problems(name, 12):
            entry = asked[problem.messages[-1]["content"]]
            # Of sums the last number is taken, so here only answers that are nothing else.
            others = ["7", "", "))", *(["1 + 2 * 3"] if task.check != "number" else [])]
            for answer in [entry["answer"], f" {entry['answer']}\n", *others]:
                right = judge.score_answer(answer.strip(), entry) >= 1.0
                assert is_right(problem, answer) == right, (name, answer)


@pytest.mark.parametrize(
    ("text", "right"),
    [("3*(4+5)", True), ("5*3 + 4*3", False), ("3*9", False), ("27", False), ("4+5)*3", False),
     ("(5 + 4)*3", True), ("9**9**9", False), ("-3*(-4-5)", True), ("5 * 3 / 0", False)],
)  # fmt: skip
def test_countdown_counts_its_numbers(text: str, right: bool) -> None:
    from thinking.checks import is_right
    from thinking.tasks import Problem

    data = {"numbers": [3, 4, 5], "target": 27}
    assert is_right(Problem("one", [], "countdown", data=data), text) == right


def test_numbers_are_found_where_answers_give_them() -> None:
    from thinking.checks import answer_of
    from thinking.tasks import Problem

    problem = Problem("one", [], "number")
    assert answer_of(problem, "16 - 3 = 13. So the answer is $1,234.00 of 2000.") == "1234"
    assert answer_of(problem, "first 3, then -4") == "-4"
    assert answer_of(problem, "none") is None


def test_instructions_are_checked() -> None:
    pytest.importorskip("if_verifiable")
    from thinking.checks import score
    from thinking.tasks import Problem

    data = {"prompt": "", "instructions": ["punctuation:no_comma", "change_case:english_lowercase"],
            "kwargs": [{}, {}]}  # fmt: skip
    problem = Problem("one", [], "ifeval", data=data)
    assert score(problem, "a quiet evening by the sea") == 1.0
    assert score(problem, "a quiet evening, by the sea") == 0.5
    assert score(problem, " ") == 0.0


def test_points_and_the_plot_of_votes() -> None:
    from thinking.curves import curves, voting
    from thinking.records import Drawn, Sample

    def problem(number: int, rights: list[bool]) -> Drawn:
        samples = [
            Sample(2, -float(k), one, float(one), "yes" if one else "no", 1.0 + k)
            for k, one in enumerate(rights)
        ]
        return Drawn(str(number), 10, samples, samples[0])

    often = [True, True, False, True] * 8  # the right answer is the usual one: votes help
    seldom = [False, True, False, False] * 8  # ... and the seldom one: votes hurt
    drawn = [problem(n, often) for n in range(6)] + [problem(6 + n, seldom) for n in range(6)]
    found = curves(drawn, [])
    assert found["one sample"][0]["accuracy"] == pytest.approx(0.5)
    vote = {point["n"]: point for point in found["vote"]}
    assert vote[4]["accuracy"] == 0.5 and vote[4]["tokens"] == 8 and vote[4]["runs"] == 8
    checked = {point["n"]: point for point in found["best-of by the exact check"]}
    assert checked[4]["accuracy"] == 1.0 and checked[4]["gain"] == pytest.approx(0.5)
    assert found["best-of by certainty"][0]["tokens"] == 2 * 2 * 2  # written, and read again
    low, high = voting(drawn)["bins"]
    assert low["right"] == 0.25 and [one["gain"] for one in low["gains"]] == [-0.25, -0.25]
    assert high["right"] == 0.75 and [one["gain"] for one in high["gains"]] == [0.25, 0.25]
