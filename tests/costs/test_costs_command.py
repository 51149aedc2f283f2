"""`unspool costs`: the page, the JSON file, two models, and error messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unspool.cli.main import _exit_code


@pytest.fixture
def sample(tmp_path: Path, texts: list[str]) -> str:
    file = tmp_path / "sample.txt"
    file.write_text(texts[0])
    return str(file)


def test_a_report_of_two_models(small_folder: Path, sample: str, tmp_path: Path, capsys: Any):
    page = tmp_path / "both.html"
    arguments = ["costs", str(small_folder), str(small_folder), "--quick", "--parts"]
    arguments += ["confidence", "--texts", sample, "--out", str(page), "--threads", "1"]
    assert _exit_code(arguments) == 0
    output = capsys.readouterr()
    assert "items answered right" in output.out and "[2]" in output.out
    assert "both.html" in output.err and "both.json" in output.err
    assert page.read_text().startswith("<!doctype html>")
    first, second = json.loads((tmp_path / "both.json").read_text())["reports"]
    assert first["parts"][0]["figures"] == second["parts"][0]["figures"]
    assert first["machine"]["texts"] == sample


def test_json_on_standard_output(small_folder: Path, sample: str, tmp_path: Path, capsys: Any):
    arguments = ["costs", "-m", str(small_folder), "--quick", "--parts", "whole", "--texts", sample]
    arguments += ["--json", "--out", str(tmp_path / "one.json"), "--threads", "1"]
    assert _exit_code(arguments) == 0
    assert json.loads(capsys.readouterr().out)["parts"][0]["name"] == "whole"
    assert (tmp_path / "one.html").exists() and (tmp_path / "one.json").exists()


def test_a_checkpoint_of_a_run_is_named_after_its_run(tmp_path: Path, small: Any):
    from unspool.costs.measuring import model_name

    small.path, before = tmp_path / "mine" / "checkpoints" / "000200", small.path
    try:
        assert model_name(small) == "mine/000200"
    finally:
        small.path = before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b", "c"], "3 models were named"),
        (["a", "-m", "b"], "name the models once"),
        (["--parts", "waitign"], "did you mean waiting"),
        (["--out", "/nowhere/at/all.html", "--parts", "loops"], "there is no folder"),
    ],
)
def test_errors_come_before_loading(arguments: list[str], message: str, capsys: Any):
    assert _exit_code(["costs", *arguments]) == 2
    assert message in capsys.readouterr().err
