"""Benchmarks of training without a GPU: everything on tiny shapes, and the measures by hand."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpu
from twins.measures import draw_hidden
from unspool.train.data.prepared import PackedDocuments
from unspool.train.learning.model_size import new_config, new_model

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


def test_unknown_parts_and_missing_data_are_refused(run_bench, capsys) -> None:
    for words, message in (
        (["nonsense"], "'nonsense' is not one of speed"),
        (["enwik8"], "--data"),
    ):
        with pytest.raises(SystemExit):
            run_bench(train_gpu, *words)
        assert message in capsys.readouterr().err


def test_every_byte_is_scored_once_with_its_context() -> None:
    """Bits per byte in overlapping windows, beside each byte's own surprise, taken one by one."""
    length = 16
    model = new_model(new_config(1, 256, length, width=32), seed=3)
    torch.nn.init.normal_(model.layers[0].attention.out.weight, std=0.5)
    text = np.random.default_rng(0).integers(0, 256, 45).astype(np.uint8)
    surprise = 0.0
    for place in range(1, len(text)):
        # As far back as the window reaches that judges this byte: the first that holds it.
        windows = [*range(0, len(text) - length - 1, length // 2), len(text) - length - 1]
        begin = next(w for w in windows if w < place <= w + length)
        with torch.no_grad():
            logits = model(torch.tensor(text[begin:place].astype(np.int64))[None])[0, -1]
        surprise -= float(torch.log_softmax(logits, -1)[int(text[place])])
    packed = PackedDocuments(text, np.array([0, len(text)]), None)
    assert train_gpu.bits_per_byte(model, packed, length) == pytest.approx(
        surprise / math.log(2) / (len(text) - 1), rel=1e-4
    )
    path = BENCH.parent / "README.md"
    train, held_out, test = train_gpu.split_enwik8(path)
    assert bytes(train.ids) + bytes(held_out.ids) + bytes(test.ids) == path.read_bytes()


def run_twins(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH / "twins_gpu.py"), *words, "--tiny", "--device", "cpu",
         "--out", str(out)],
        capture_output=True, text=True, timeout=280,
        env={**os.environ, "UNSPOOL_CACHE": str(out / "cache")},
    )  # fmt: skip


@pytest.mark.slow
def test_all_twins_of_a_tiny_model(tmp_path: Path) -> None:
    stopped = run_twins(tmp_path, "countdown", "--limit", "0.000001")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert "the same command resumes" in stopped.stdout
    done = run_twins(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    for part in ("block", "block-lora"):
        assert results[part]["words"]["block 4"] > 0
        assert len(results[part]["words"]["agreement"]) == 7
    assert set(results["fill"]["words"]["holes"]) == {"1", "2", "4", "8"}
    for name in ("sudoku", "countdown"):
        bidirectional, causal = results[name]["whole"], results[name]["causal"]
        assert bidirectional["steps"] == causal["steps"]
        assert bidirectional["parameters"] == causal["parameters"]
    for part in ("block", "fill", "sudoku-whole", "sudoku-causal", "countdown-whole"):
        assert (tmp_path / "weights" / part / "model.safetensors").exists()
    assert (tmp_path / "weights" / "block-lora" / "adapter_model.safetensors").exists()


def test_hidden_tokens_of_the_bound_weigh_what_the_bound_says() -> None:
    blocks = torch.arange(0, 40, 4).repeat_interleave(4)[None].expand(500, -1)
    hide, weight = draw_hidden(blocks, torch.Generator().manual_seed(0))
    grouped = hide.view(500, 10, 4)
    assert not grouped[:, :, 0].any()
    hidden = grouped.sum(2)
    assert set(hidden.unique().tolist()) == {1, 2, 3}
    assert torch.allclose(weight.view(500, 10, 4)[:, :, 1], 3 / hidden)
    shares = [(hidden == count).float().mean().item() for count in (1, 2, 3)]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.03)
    # Each token is weighed as one on average: the bound of a model that does not look is exact.
    assert (hide * weight).view(500, 10, 4)[:, :, 1:].mean() == pytest.approx(1, abs=0.02)
