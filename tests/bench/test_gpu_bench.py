"""The GPU's bench without a GPU: the whole of it on tiny shapes, its limits, its table."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from gpus import limits, parts, report  # noqa: E402


def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_bench", BENCH / "gpu.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_kind_of_work_runs_on_tiny_shapes(tmp_path: Path) -> None:
    asked = ["8b", "8b-first", "0.6b-sampled", "8b-q4", "8b-load"]
    found = subprocess.run(
        [sys.executable, str(BENCH / "gpu.py"), *asked, "--tiny", "--device", "cpu",
         "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["parts"]) == {*asked, "8b@static"} and not results["failed"]
    for name in asked:
        assert results["parts"][name]["seconds"] > 0
    assert results["parts"]["0.6b-sampled"]["same_alone"] == "3 of 3"
    table = (tmp_path / "table.md").read_text()
    assert table in found.stdout
    for name in asked:
        assert f"| {parts.PARTS[name].title} |" in table


def test_a_part_that_ends_its_process_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    module = gpu()
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys\n"
        "for name in sys.argv[1:]:\n"
        "    print(json.dumps({'part': name, 'begin': True}), flush=True)\n"
        "    if name == '8b': os.abort()\n"
        "    if name == '0.6b': told = {'error': 'ValueError: lost'}\n"
        "    else: told = {'result': {'tokens_s': 5.0, 'seconds': 1.0, 'first_s': 1.0}}\n"
        "    print(json.dumps({'part': name, **told}), flush=True)\n"
    )
    bench = module.Bench(argparse.Namespace(limit=60, out=tmp_path))
    bench.command = lambda names: [sys.executable, str(script), *names]
    bench.run(["135m", "8b", "0.6b", "8b-sampled"])
    assert set(bench.results["parts"]) == {"135m", "8b-sampled"}
    assert bench.results["failed"]["0.6b"] == "ValueError: lost"
    assert "exit status" in bench.results["failed"]["8b"]
    assert "- 0.6b could not be measured: ValueError: lost" in report.markdown(bench.results)


def test_a_part_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = gpu()
    slow = parts.Part(key="8b", title="slow", shape="8b", seconds=1)
    monkeypatch.setitem(parts.PARTS, "8b", slow)
    bench = module.Bench(argparse.Namespace(limit=60, out=tmp_path))
    begin = json.dumps({"part": "8b", "begin": True})
    code = f"print({begin!r}, flush=True); import time; time.sleep(50)"
    bench.command = lambda names: [sys.executable, "-c", code]
    bench.run(["8b"])
    assert "took too long" in bench.results["failed"]["8b"]


def test_the_least_a_model_must_read_and_compute() -> None:
    from unspool.model.files.config_json import config_from_hf

    config = config_from_hf(parts.SHAPES["8b"])
    numbers = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336) + 128256 * 4096
    costs = limits.Costs(config, numbers * 2)
    step = costs.decode(1, 0, 1)
    assert step["bytes"] == numbers * 2 + 2 * 32 * 8 * 128 * 2
    assert step["flops"] == pytest.approx(numbers * 2, rel=1e-3)
    reading = costs.prompt(1, 4096)
    assert reading["flops"] > 2 * 4096 * (numbers - 128256 * 4096)
    device: limits.Limits = {"device": "x", "bandwidth": 4.66e12, "flops": 790e12}
    assert 1 / limits.floor([step], device) == pytest.approx(310, rel=0.01)


def test_the_table_says_what_must_be_and_is() -> None:
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
            "8b-first": {**entry, "tokens_s": 9.0},
        },
        "failed": {},
    }
    table = report.markdown(results)
    assert "H200: reads 4.00 TB/s, multiplies bf16 at 800 TFLOP/s; torch 2." in table
    assert "| 8B bf16, one text | 300 | 600 | 50% | 250 ✓ | 263 | 10 | – | 150 | 2.0x |" in table
    assert "| 135M bf16, one text | 2,000 | 4,000 | 50% | 2,500 ✗ | 3,000 |" in table
    assert "| 50% ✓ |" in table


def test_unknown_parts_are_refused_in_words() -> None:
    run = [sys.executable, str(BENCH / "gpu.py")]
    refused = subprocess.run([*run, "9b"], capture_output=True, text=True)
    assert refused.returncode == 2 and "'9b' is not one of 8b" in refused.stderr
