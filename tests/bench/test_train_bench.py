"""The bench of training without a GPU: the whole of it on a tiny shape."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
def test_every_part_runs_on_a_tiny_shape(tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text(
        "\n\n".join(f"the {n} people of these states go on {n * n}" for n in range(2000))
    )
    done = subprocess.run(
        [sys.executable, str(BENCH / "train_gpu.py"), "--tiny", "--device", "cpu",
         "--data", str(text), "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=280,
        env={**os.environ, "UNSPOOL_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["speed"]["tiny"]["tokens_per_second"] > 0
    assert results["speed"]["tiny"]["update_share"] > 0
    race = results["optimizers"]
    assert set(race["muon"]) <= {"0.5", "1"}
    assert race["share"] in (None, 0.5, 1.0)
    assert "Muon needs" in done.stdout


def test_a_part_that_is_not_there_is_told() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "train_gpu.py"), "nonsense"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "there is no part 'nonsense'" in done.stderr
