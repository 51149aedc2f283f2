"""The comparison's own parts: the protocol, the turns, the statistics, the table."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from peers import environments, measure, quality  # noqa: E402
from peers.report import markdown  # noqa: E402
from peers.workers import Worker, WorkerError, cold_start  # noqa: E402

FAKE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from protocol import serve

class Fake:
    name, weights, weight_bytes = "fake 1", None, 100
    def __init__(self, options): self.threads = options.threads
    def write(self, prompts, new, mark):
        print("libraries print, too")
        if prompts[0][0] == 13: raise ValueError("no thirteens")
        mark()
        return [[row[0]] * (new - (row[0] == 7)) for row in prompts]
    def logits(self, ids):
        import numpy as np
        return np.eye(len(ids), 5)
    def first(self, text): return text + "!"

serve(Fake)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    return [sys.executable, str(script), str(BENCH / "peers"), "--model", "none"]


def cpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cpu_bench", BENCH / "cpu.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_worker_answers_jobs_and_sleeps_between_them(command: list[str], tmp_path: Path) -> None:
    with Worker(command, environments.environment(2)) as worker:
        assert worker.engine == "fake 1"
        found = worker.ask(work="write", prompts=[[1], [2]], new=3)
        assert found["ids"] == [[1, 1, 1], [2, 2, 2]]
        assert 0 <= found["first_s"] <= found["seconds"]
        assert worker.ask(work="logits", ids=[1, 2], file=str(tmp_path / "l.npy"))["rows"] == 2
        assert worker.ask(work="memory")["peak_mb"] > 1
        state = Path(f"/proc/{worker.process.pid}/stat")
        if state.exists():
            until = time.monotonic() + 60
            while state.read_text().rsplit(")", 1)[1].split()[0] != "T":  # stopped
                assert time.monotonic() < until
                time.sleep(0.01)
    assert worker.process.returncode is not None


def test_a_failed_job_is_told_and_the_worker_goes_on(command: list[str]) -> None:
    with Worker(command, environments.environment(1)) as worker:
        with pytest.raises(WorkerError, match="no thirteens"):
            worker.ask(work="write", prompts=[[13]], new=2)
        with pytest.raises(WorkerError, match="instead of 4 each"):
            worker.ask(work="write", prompts=[[7]], new=4)
        assert worker.ask(work="write", prompts=[[5]], new=1)["ids"] == [[5]]


def test_an_engine_that_dies_says_why() -> None:
    with pytest.raises(WorkerError, match="exit status 1: ImportError: no such engine"):
        Worker([sys.executable, "-c", "raise ImportError('no such engine')"], {})


def test_cold_start_is_timed_to_the_first_byte(command: list[str]) -> None:
    assert 0 < cold_start([*command, "--cold", "Hi"], environments.environment(1)) < 60
    with pytest.raises(WorkerError, match="lost"):
        cold_start([sys.executable, "-c", "raise SystemExit('lost')"], {})


def test_prompts_never_begin_alike() -> None:
    prompts = measure.Prompts(range(100))
    texts = [prompts.take(250) for _ in range(500)]
    assert {len(text) for text in texts} == {250}
    assert len({text[0] for text in texts}) == 500


def test_ratios_are_taken_within_a_round() -> None:
    assert measure.paired([10, 30, None], [5, 10, 4]) == {"median": 2.5, "low": 2, "high": 3}
    assert measure.paired([], [1]) is None
    assert measure.agreement([1, 2, 3], [1, 2, 4]) == 2
    assert measure.bandwidth(1, 1, repeat=1) > 1e6


def test_divergence_is_zero_for_equal_logits_and_known_for_others() -> None:
    true = np.log(np.array([[0.5, 0.5], [0.5, 0.5]]))
    other = np.log(np.array([[0.25, 0.75], [0.5, 0.5]]))
    assert quality._compare(true, true + 3, [0, 1])[0] == pytest.approx(0)
    expected = 0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75)
    assert quality._compare(true, other, [0, 1])[0] == pytest.approx(expected)


def test_the_table_names_what_could_not_be_measured() -> None:
    entry: dict[str, Any] = {"title": "x", "weights": "int4", "failed": {}, "weight_bytes": 10**8}
    results = {
        "machine": {"processor": "p", "architecture": "a", "cores": 2},
        "threads": 2,
        "rounds": 2,
        "model": "m",
        "bandwidth": {"80": [2e10], "300": [1e10]},
        "engines": {
            "us": {**entry, "title": "us", "decode": [100.0, 120.0]},
            "slow": {**entry, "title": "slow", "decode": [50.0, 40.0]},
            "gone": {**entry, "title": "gone", "failed": {"all": "no wheel for this machine"}},
        },
        "growth": {"us": {"context": {"128": [5.0]}, "batch": {}}},
    }
    table = markdown(json.loads(json.dumps(results)))
    assert "| slow | int4 | 45 (2.50x, 2.00 to 3.00) |" in table
    assert "gone: could not be measured: no wheel for this machine" in table
    assert "55%" in table or "56%" in table
    assert "20.0 GB/s from 80 MB" in table


def test_what_cannot_be_installed_has_a_reason(tmp_path: Path) -> None:
    with pytest.raises(environments.UnavailableError, match="cannot be installed"):
        environments._do([sys.executable, "-c", "exit(1)"], "cannot be installed")
    peer = next(peer for peer in environments.PEERS if peer.key == "openvino")
    (tmp_path / "models" / "hf").mkdir(parents=True)
    (tmp_path / "models" / "hf" / "model.safetensors").touch()
    with pytest.raises(environments.UnavailableError, match="nothing is converted"):
        environments.prepare(peer, tmp_path, tmp_path / "m.gguf", installed=True)


def test_help_has_examples_and_unknown_names_are_refused_in_words() -> None:
    run = [sys.executable, str(BENCH / "cpu.py")]
    assert "examples:" in subprocess.run([*run, "--help"], capture_output=True, text=True).stdout
    refused = subprocess.run([*run, "--work", "dance"], capture_output=True, text=True)
    assert refused.returncode == 2 and "'dance' is not one of decode" in refused.stderr


def test_we_are_always_measured() -> None:
    bench = cpu()
    assert bench.chosen("us", ["llama_cpp"]) and bench.chosen("transformers_bf16", ["transformers"])
    assert not bench.chosen("openvino", ["llama_cpp"])
