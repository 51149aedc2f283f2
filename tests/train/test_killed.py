"""Killed at any moment, gone on with: the same weights, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# One process imports torch and forks a child for each life of the run, so that many deaths take
# little time. A child kills itself at the n-th call that touches files, or in the middle of a step.
LIVES = """
import os, random, signal, sys
from pathlib import Path
from helpers.tiny_training import tiny_trainer
import unspool.train.running.loop as loop

folder, whole = Path(sys.argv[1]) / "killed", Path(sys.argv[1]) / "whole"
rng = random.Random(int(sys.argv[2]))

def child(path, calls):
    pid = os.fork()
    if pid == 0:
        left = calls
        def deadly(function):
            def called(*given, **named):
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*given, **named)
            return called
        if calls:
            for name in ("fsync", "rename", "replace", "unlink", "mkdir"):
                setattr(os, name, deadly(getattr(os, name)))
            loop.set_rates = deadly(loop.set_rates)
        tiny_trainer(path, 6, save_every=2, accumulate=2).run()
        os._exit(0)
    return os.waitpid(pid, 0)[1]

assert child(whole, 0) == 0
deaths = 0
while child(folder, rng.randrange(8, 90)) != 0:
    deaths += 1
    for saved in (folder / "checkpoints").glob("[0-9]*"):
        assert (saved / "model.safetensors").exists() and (saved / "training.json").exists()
    assert deaths < 200
print(deaths)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_killed_at_any_moment(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", LIVES, str(tmp_path), "1"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)},
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 3
    for name in ("model.safetensors", "state/state.safetensors", "training.json"):
        first, other = (
            tmp_path / run / "checkpoints" / "000006" / name for run in ("whole", "killed")
        )
        if name.endswith(".json"):
            facts = [json.loads(path.read_text()) for path in (first, other)]
            assert facts[0]["tokens"] == facts[1]["tokens"]
        else:
            assert first.read_bytes() == other.read_bytes(), name
    logs = [
        [(line["step"], line["loss"]) for line in map(json.loads, path.open())]
        for path in (tmp_path / "whole" / "log.jsonl", tmp_path / "killed" / "log.jsonl")
    ]
    assert logs[0] == logs[1]
