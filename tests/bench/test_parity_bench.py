"""The table of how near each family comes: does it say what the tests say?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_families():
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "parity.py", "llama", "lfm2"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["llama", "lfm2"]
    for row in rows:
        assert float(row[1]) > 0.5, "a model that says nothing proves nothing"
        assert len(row) == 6 and max(map(float, row[2:])) < 1e-4
