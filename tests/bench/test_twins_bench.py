"""The bench of twins without a GPU: every part on a tiny model, broken off and gone on with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"


def bench(out: Path, *given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH / "twins_gpu.py"), *given, "--tiny", "--device", "cpu",
         "--out", str(out)],
        capture_output=True, text=True, timeout=280,
        env={**os.environ, "UNSPOOL_CACHE": str(out / "cache")},
    )  # fmt: skip


@pytest.mark.slow
def test_every_part_runs_on_a_tiny_model(tmp_path: Path) -> None:
    stopped = bench(tmp_path, "countdown", "--limit", "0.000001")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert "the same command goes on" in stopped.stdout
    done = bench(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    for part in ("block", "block-lora"):
        assert results[part]["words"]["block 4"] > 0
        assert len(results[part]["words"]["agreement"]) == 7
    assert set(results["fill"]["words"]["holes"]) == {"1", "2", "4", "8"}
    assert results["draft"]["written"]["tokens a pass"]["7"] >= 1
    for name in ("sudoku", "countdown"):
        whole, causal = results[name]["whole"], results[name]["causal"]
        assert whole["steps"] == causal["steps"] and whole["parameters"] == causal["parameters"]
    for part in ("block", "fill", "sudoku-whole", "sudoku-causal", "countdown-whole"):
        assert (tmp_path / "weights" / part / "model.safetensors").exists()
    assert (tmp_path / "weights" / "block-lora" / "adapter_model.safetensors").exists()
    assert (tmp_path / "weights" / "draft" / "head.safetensors").exists()


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)


@pytest.mark.usefixtures("measures")
def test_hidden_tokens_of_the_bound_weigh_what_the_bound_says() -> None:
    from twins.block import drawn

    blocks = torch.arange(0, 40, 4).repeat_interleave(4)[None].expand(500, -1)
    hide, weight = drawn(blocks, torch.Generator().manual_seed(0))
    grouped = hide.view(500, 10, 4)
    assert not grouped[:, :, 0].any()
    hidden = grouped.sum(2)
    assert set(hidden.unique().tolist()) == {1, 2, 3}
    assert torch.allclose(weight.view(500, 10, 4)[:, :, 1], 3 / hidden)
    shares = [(hidden == count).float().mean().item() for count in (1, 2, 3)]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.03)
    # Each token is weighed as one on average: the bound of a model that does not look is exact.
    assert (hide * weight).view(500, 10, 4)[:, :, 1:].mean() == pytest.approx(1, abs=0.02)


@pytest.mark.usefixtures("measures")
def test_the_area_under_the_curve() -> None:
    from twins.fill import area

    scores = torch.tensor([0.1, 0.4, 0.35, 0.8])
    assert area(scores, torch.tensor([0, 0, 1, 1])) == 0.75
    assert area(torch.zeros(4), torch.tensor([0, 1, 0, 1])) == 0.5
    assert area(scores, torch.tensor([1, 0, 1, 0])) == 0.0


@pytest.mark.usefixtures("measures")
def test_passes_are_counted_as_drafting_takes_them() -> None:
    from twins.draft import _walk

    all_right, none = [[True] * 7] * 9, [[False] * 7] * 9
    assert _walk(none, 0, 8, 7) == 8
    assert _walk(all_right, 0, 8, 3) == 2
    assert _walk(all_right, 0, 8, 7) == 1
    assert _walk([[True, False, True]] * 9, 0, 8, 3) == 4
