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


def test_every_byte_is_judged_once_behind_what_comes_before_it(monkeypatch) -> None:
    """Bits per byte in overlapping windows, beside each byte's own surprise, taken one by one."""
    import math

    import numpy as np
    import torch

    monkeypatch.syspath_prepend(str(BENCH))
    from training.enwik8 import judged, parts
    from unspool.train.data.prepared import PackedDocuments
    from unspool.train.learning.model_size import new_config, new_model

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
    assert judged(model, packed, length) == pytest.approx(
        surprise / math.log(2) / (len(text) - 1), rel=1e-4
    )
    path = BENCH.parent / "README.md"
    train, held_out, test = parts(path)
    assert bytes(train.ids) + bytes(held_out.ids) + bytes(test.ids) == path.read_bytes()
