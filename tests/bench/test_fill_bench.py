"""The bench of gaps and planted errors: the whole of it on a tiny model and a page of text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from helpers.word_model import TEXT, save_worded

BENCH = Path(__file__).parents[2] / "bench"


def test_every_part_runs_on_a_tiny_model(tmp_path: Path) -> None:
    text = tmp_path / "page.txt"
    text.write_text(TEXT, encoding="utf-8")
    model = save_worded(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, str(BENCH / "fill.py"), "--tiny", "--model", str(model),
         "--text", str(text), "--out", str(tmp_path / "results.json")],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert {*results["holes"]} == {"1 left to right", "1 ranked", "2 left to right", "2 ranked"}
    assert all(0 <= one["exact"] <= 1 for one in results["holes"].values())
    assert {*results["doubt"]} == {"surprise", "causal"}
    assert all(0 <= value <= 1 for value in results["doubt"].values())
