"""The bench of edits: its errors, its counts and its figures by hand, and the whole on a tiny
model."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from helpers.word_model import TEXT, save_worded

BENCH = Path(__file__).parents[2] / "bench"
KINDS = {"planted", "letters", "words", "clean"}


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def test_typing_errors_and_wrong_words() -> None:
    from editing.errors import errors, swapped_letters, swapped_words

    rng = np.random.default_rng(0)
    typed, mistaken = swapped_letters(TEXT, rng), swapped_words(TEXT, rng)
    assert len(typed) == len(TEXT) and sorted(typed) == sorted(TEXT)
    assert {*re.findall(r"\w+", mistaken)} <= {*re.findall(r"\w+", TEXT)}  # none that is new
    for damaged in (typed, mistaken):
        words, found = damaged.split(), errors(TEXT, damaged)
        assert 3 < len(found) < 40
        for place, right in found:
            words[place.start : place.stop] = right
        assert words == TEXT.split()


def test_what_a_revision_did_is_counted() -> None:
    from editing.errors import Case, errors, outcome

    case = Case("planted", "one two three four five six", "one too three fo ur five sax")
    places = [(list(place), right) for place, right in errors(case.original, case.damaged)]
    assert places == [([1], ["two"]), ([3, 4], ["four"]), ([6], ["six"])]
    told = outcome(case, "one two thee fo or five sex")
    assert (told.errors, told.changed, told.touched) == (3, 4, 3)
    assert (told.restored, told.false) == (1, 1)  # "two"; "three" was right
    assert outcome(case, case.damaged).changed == 0


def test_figures_of_texts_that_were_judged() -> None:
    from editing.judging import summary

    counts = {"errors": 1, "touched": 1, "restored": 1, "false": 0}
    records = [
        {"original": 1.0, "before": 1.4, "after": 1.2, "changed": 1, **counts},
        {"original": 1.0, "before": 1.4, "after": 1.5, "changed": 2, **counts},
        {"original": 1.0, "before": 1.2, "after": 1.2, "changed": 0, **counts},
    ]
    told = summary(records)
    assert (told["texts"], told["changed_texts"]) == (3, 2)
    assert (told["preferred"], told["not_preferred"]) == (1, 1)
    assert told["change"] == pytest.approx(-0.1 / 3)
    assert told["repaired"] == pytest.approx(0.1)
    low, high = told["change_95"]
    assert low == pytest.approx(-0.2) and high == pytest.approx(0.1)  # three texts: anything goes
    clean = summary([{**one, "original": one["before"]} for one in records])
    assert math.isnan(clean["repaired"])


@pytest.mark.parametrize("once", [False, True])
def test_every_part_runs_on_a_tiny_model(tmp_path: Path, once: bool) -> None:
    text = tmp_path / "page.txt"
    text.write_text(TEXT, encoding="utf-8")
    model, judge = save_worded(tmp_path / "model"), save_worded(tmp_path / "judge", seed=1)
    done = subprocess.run(
        [sys.executable, str(BENCH / "edit.py"), "--tiny", "--model", str(model),
         "--judge", str(judge), "--text", str(text), "--thresholds", "0.2", "0.9",
         "--trusts", "0", "10", "--out", str(tmp_path / "results.json"), *["--once"][:once]],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    settings = {(row["kind"], row["trust"], row["threshold"]) for row in results["figures"]}
    assert settings == {*product(KINDS, (0, 10), (0.2, 0.9))}
    for row in results["figures"]:
        assert row["preferred"] + row["not_preferred"] <= row["changed_texts"] <= row["texts"]
        assert (row["errors"] == 0) == (row["kind"] == "clean")
    assert any(row["changed"] for row in results["figures"])
    assert all(math.isfinite(one["after"]) for one in results["texts"])
