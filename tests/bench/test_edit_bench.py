"""Benchmarks of texts: errors, counts and figures by hand, and everything on tiny models."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import diffuse
import edit
import fill
from helpers.word_model import TEXT, save_worded

BENCH = Path(__file__).parents[2] / "bench"

KINDS = {"planted", "letters", "words", "clean"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a model and a judge."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "page.txt").write_text(TEXT, encoding="utf-8")
    save_worded(folder / "model")
    save_worded(folder / "judge", seed=1)
    return folder


def test_typing_errors_and_wrong_words() -> None:
    random = np.random.default_rng(0)
    typed, mistaken = edit.swap_letters(TEXT, random), edit.swap_words(TEXT, random)
    assert len(typed) == len(TEXT) and sorted(typed) == sorted(TEXT)
    assert {*re.findall(r"\w+", mistaken)} <= {*re.findall(r"\w+", TEXT)}  # no new ones
    for damaged in (typed, mistaken):
        words, errors = damaged.split(), edit.find_errors(TEXT, damaged)
        assert 3 < len(errors) < 40
        for place, right in errors:
            words[place.start : place.stop] = right
        assert words == TEXT.split()


def test_effects_of_a_revision_are_counted() -> None:
    case = edit.Case("planted", "one two three four five six", "one too three fo ur five sax")
    places = [
        (list(place), right) for place, right in edit.find_errors(case.original, case.damaged)
    ]
    assert places == [([1], ["two"]), ([3, 4], ["four"]), ([6], ["six"])]
    counts = edit.count_outcome(case, "one two thee fo or five sex")
    assert (counts["errors"], counts["changed"], counts["touched"]) == (3, 4, 3)
    assert (counts["restored"], counts["false"]) == (1, 1)  # "two"; "three" was right
    assert edit.count_outcome(case, case.damaged)["changed"] == 0


def test_figures_of_texts_that_were_judged() -> None:
    counts = {"errors": 1, "touched": 1, "restored": 1, "false": 0}
    records = [
        {"original": 1.0, "before": 1.4, "after": 1.2, "changed": 1, **counts},
        {"original": 1.0, "before": 1.4, "after": 1.5, "changed": 2, **counts},
        {"original": 1.0, "before": 1.2, "after": 1.2, "changed": 0, **counts},
    ]
    figures = edit.summarize(records)
    assert (figures["texts"], figures["changed_texts"]) == (3, 2)
    assert (figures["preferred"], figures["not_preferred"]) == (1, 1)
    assert figures["change"] == pytest.approx(-0.1 / 3)
    assert figures["repaired"] == pytest.approx(0.1)
    low, high = figures["change_95"]
    assert low == pytest.approx(-0.2) and high == pytest.approx(0.1)  # three texts: the full range
    clean = edit.summarize([{**r, "original": r["before"]} for r in records])
    assert math.isnan(clean["repaired"])


@pytest.mark.parametrize("once", [False, True])
def test_edit_on_a_tiny_model(run_bench, files: Path, tmp_path: Path, once: bool) -> None:
    trusts, thresholds = ((0, 10), (0.2, 0.9)) if once else ((0,), (0.2,))
    run_bench(
        edit, "--tiny", "--model", files / "model", "--judge", files / "judge",
        "--text", files / "page.txt", "--trusts", *trusts, "--thresholds", *thresholds,
        "--out", tmp_path / "results.json", *["--once"][:once],
    )  # fmt: skip
    results = json.loads((tmp_path / "results.json").read_text())
    settings = {(row["kind"], row["trust"], row["threshold"]) for row in results["figures"]}
    assert settings == {*product(KINDS, trusts, thresholds)}
    for row in results["figures"]:
        assert row["preferred"] + row["not_preferred"] <= row["changed_texts"] <= row["texts"]
        assert (row["errors"] == 0) == (row["kind"] == "clean")
    assert any(row["changed"] for row in results["figures"])
    assert all(math.isfinite(record["after"]) for record in results["texts"])


def test_fill_on_a_tiny_model(run_bench, files: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "results.json", files / "page.txt"
    run_bench(fill, "--tiny", "--model", files / "model", "--text", text, "--out", out)
    results = json.loads(out.read_text())
    assert {*results["holes"]} == {"1 left to right", "1 ranked", "2 left to right", "2 ranked"}
    assert all(0 <= figures["exact"] <= 1 for figures in results["holes"].values())
    assert {*results["doubt"]} == {"surprise", "causal"}
    assert all(0 <= value <= 1 for value in results["doubt"].values())


@pytest.mark.slow
def test_diffuse_on_a_tiny_model(run_bench, tmp_path: Path, capsys) -> None:
    run_bench(diffuse, "--tiny", "--json", tmp_path / "t.json", "--plot", tmp_path / "c.svg")
    assert "the same tokens" in capsys.readouterr().out
    rows = json.loads((tmp_path / "t.json").read_text())
    assert rows[0]["tokens_per_pass"] == 1 and rows[0]["tokens"] <= 16
    assert rows[-1]["setting"]["steps"] == 1
    assert ElementTree.parse(tmp_path / "c.svg").getroot().tag.endswith("svg")


def test_measures_of_texts() -> None:
    assert diffuse.entropy([5, 5, 6, 6]) == pytest.approx(1.0) and diffuse.entropy([]) == 0
    assert math.isnan(diffuse.perplexity(None, ["a"], [None]))


@pytest.mark.slow
def test_parity_of_two_families() -> None:
    command = [sys.executable, str(BENCH / "parity.py"), "llama", "lfm2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["llama", "lfm2"]
    for row in rows:
        assert float(row[1]) > 0.5, "constant logits prove nothing"
        assert len(row) == 6 and max(map(float, row[2:])) < 1e-4
