"""The GPU benchmark without a GPU: tiny shapes, crashes, limits, table."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpu
from lib import limits
from lib.shapes import SHAPES

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
def test_every_kind_of_work_runs_on_tiny_shapes(tmp_path: Path) -> None:
    names = ["8b", "8b-first", "0.6b-sampled", "8b-q4", "8b-load", "8b-mtp-3-0.7"]
    done = subprocess.run(
        [sys.executable, str(BENCH / "gpu.py"), *names, "--tiny", "--device", "cpu",
         "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["parts"]) == {*names, "8b@static"} and not results["failed"]
    for name in names:
        assert results["parts"][name]["seconds"] > 0
    assert results["parts"]["0.6b-sampled"]["same_alone"] == "3 of 3"
    assert results["parts"]["8b-mtp-3-0.7"]["speedup"] > 0
    table = (tmp_path / "table.md").read_text()
    assert table in done.stdout
    for name in names:
        assert f"| {gpu.PARTS[name].title} |" in table


def test_a_crash_is_reported_and_the_next_parts_run(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys\n"
        "for name in sys.argv[1:]:\n"
        "    print(json.dumps({'part': name, 'begin': True}), flush=True)\n"
        "    if name == '8b': os.abort()\n"
        "    if name == '0.6b': message = {'error': 'ValueError: lost'}\n"
        "    else: message = {'result': {'tokens_s': 5.0, 'seconds': 1.0, 'first_s': 1.0}}\n"
        "    print(json.dumps({'part': name, **message}), flush=True)\n"
    )
    bench = gpu.Bench(argparse.Namespace(limit=60, out=tmp_path))
    bench.command = lambda names: [sys.executable, str(script), *names]
    bench.run(["135m", "8b", "0.6b", "8b-sampled"])
    assert set(bench.results["parts"]) == {"135m", "8b-sampled"}
    assert bench.results["failed"]["0.6b"] == "ValueError: lost"
    assert "exit status" in bench.results["failed"]["8b"]
    assert "- 0.6b could not be measured: ValueError: lost" in gpu.markdown(bench.results)


def test_a_part_that_takes_too_long_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = gpu.Part(key="8b", title="slow", shape="8b", seconds=1)
    monkeypatch.setitem(gpu.PARTS, "8b", slow)
    bench = gpu.Bench(argparse.Namespace(limit=60, out=tmp_path))
    begin = json.dumps({"part": "8b", "begin": True})
    code = f"print({begin!r}, flush=True); import time; time.sleep(50)"
    bench.command = lambda names: [sys.executable, "-c", code]
    bench.run(["8b"])
    assert "took too long" in bench.results["failed"]["8b"]


def test_the_least_a_model_must_read_and_compute() -> None:
    from unspool.model.files.config_json import config_from_hf

    config = config_from_hf(SHAPES["8b"])
    numbers = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336) + 128256 * 4096
    costs = limits.ModelCosts(config, 16)
    step = costs.decode(1, 0, 1)
    assert step["bytes"] == pytest.approx(numbers * 2 + 2 * 32 * 8 * 128 * 2, rel=1e-4)
    assert step["flops"] == pytest.approx(numbers * 2, rel=1e-3)
    reading = costs.prompt(1, 4096)
    assert reading["flops"] > 2 * 4096 * (numbers - 128256 * 4096)
    device: limits.Limits = {"device": "x", "bandwidth": 4.66e12, "flops": 790e12}
    assert 1 / limits.least_seconds([step], device) == pytest.approx(310, rel=0.01)


def test_the_least_of_experts_and_of_recurrent_states() -> None:
    from unspool.model.files.config_json import config_from_hf

    config = config_from_hf(SHAPES["qwen3.6-35b-a3b"])
    costs = limits.ModelCosts(config, 4.5)
    layer = 3 * 2048 * 512  # numbers of one expert
    for_one, for_all = costs.read_bytes(1), costs.read_bytes(10_000)
    assert for_all - for_one == pytest.approx(40 * 248 * layer * 4.5 / 8, rel=1e-6)
    reads = costs.decode(2, 0, 1)["bytes"] - costs.read_bytes(2)
    assert reads == pytest.approx(2 * 2 * config.state_bytes, rel=0.01)


def test_the_table_has_fractions_of_the_limit() -> None:
    device = {"device": "H200", "bandwidth": 4e12, "flops": 8e14}
    phase = {"bytes": 4e12, "flops": 0.0}
    entry: dict[str, Any] = {"seconds": 2.0, "first_s": 0.01, "floor": [phase]}
    results = {
        "versions": "torch 2",
        "limits": device,
        "parts": {
            "8b": {**entry, "tokens_s": 300.0},
            "8b@static": {"tokens_s": 150.0, "seconds": 1.0},
            "135m": {**entry, "tokens_s": 2000.0},
        },
        "failed": {},
    }
    table = gpu.markdown(results)
    assert "H200: reads 4.00 TB/s, multiplies bf16 at 800 TFLOP/s; torch 2." in table
    assert "| 8B bf16, one text | 300 | 600 | 50% | 10 | – | 150 | 2.0x |" in table
    assert "| 135M bf16, one text | 2,000 | 4,000 | 50% |" in table


def test_parts_of_one_model_share_a_process_and_unknown_ones_are_refused(
    run_bench, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_bench(gpu, "9b")
    assert "'9b' is not one of 8b" in capsys.readouterr().err
    names = ["8b", "0.6b", "8b-sampled", "8b-load", "8b-64"]
    groups = gpu.group_parts(names, together=False, peers=True)
    assert groups[:4] == [["limits"], ["8b", "8b-sampled", "8b-64"], ["0.6b"], ["8b-load"]]
    assert ["8b@static", "8b-64@static"] in groups and ["8b-64@continuous"] in groups
