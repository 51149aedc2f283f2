"""The curve of quality against tokens a pass: the bench itself runs, and its measures are right."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_the_bench_runs_without_a_real_model(tmp_path: Path):
    found = subprocess.run(
        [sys.executable, "bench/diffuse.py", "--tiny", "--json", str(tmp_path / "table.json"),
         "--plot", str(tmp_path / "curve.svg")],
        capture_output=True, text=True, cwd=ROOT, timeout=300,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "the same tokens" in found.stdout
    rows = json.loads((tmp_path / "table.json").read_text())
    assert rows[0]["tokens_per_pass"] == 1 and rows[0]["tokens"] <= 16
    assert rows[-1]["setting"]["steps"] == 1
    assert ElementTree.parse(tmp_path / "curve.svg").getroot().tag.endswith("svg")


def test_its_measures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import diffuse

    assert diffuse.repeated([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert diffuse.entropy([5, 5, 6, 6]) == pytest.approx(1.0)
    assert math.isnan(diffuse.perplexity(None, ["a"], [None]))
