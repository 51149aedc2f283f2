"""The table of how near each family comes: does it say what the tests say?"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "bench" / "parity.py"


def test_two_families(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    spec = importlib.util.spec_from_file_location("parity_bench", FILE)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    monkeypatch.setattr(sys, "argv", ["parity.py", "llama", "lfm2"])
    bench.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["llama", "lfm2"]
    for row in rows:
        assert float(row[1]) > 0.5, "a model that says nothing proves nothing"
        assert len(row) == 6 and max(map(float, row[2:])) < 1e-4
