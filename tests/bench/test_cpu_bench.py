"""The comparison of engines: worker protocol, statistics, table."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cpu
from lib import peers, report, stats
from lib.limits import cpu_bandwidth
from lib.peers import Worker, WorkerError, cold_start, thread_environment

BENCH = Path(__file__).parents[2] / "bench"
FAKE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from engines import Engine, serve


class Fake(Engine):
    name, weight_bytes = "fake 1", 100
    def __init__(self, model, threads, dtype): self.threads = threads
    def write(self, prompts, new, mark):
        print("libraries print, too")
        if prompts[0][0] == 13: raise ValueError("no thirteens")
        mark()
        return [[row[0]] * (new - (row[0] == 7)) for row in prompts]
    def logits(self, ids):
        import numpy as np
        return np.eye(len(ids), 5)
    def first_token(self, text): return text + "!"

serve(Fake, sys.argv[1:])
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    return [sys.executable, str(script), str(BENCH / "lib"), "--model", "none"]


def test_a_worker_is_suspended_between_jobs(command: list[str], tmp_path: Path) -> None:
    with Worker(command, thread_environment(2)) as worker:
        assert worker.engine == "fake 1"
        answer = worker.ask(work="write", prompts=[[1], [2]], new=3)
        assert answer["ids"] == [[1, 1, 1], [2, 2, 2]]
        assert 0 <= answer["first_s"] <= answer["seconds"]
        assert worker.ask(work="logits", ids=[1, 2], file=str(tmp_path / "l.npy"))["rows"] == 2
        assert worker.ask(work="memory")["peak_mb"] > 1
        with pytest.raises(WorkerError, match="no thirteens"):  # a failed job does not end it
            worker.ask(work="write", prompts=[[13]], new=2)
        with pytest.raises(WorkerError, match="instead of 4 each"):
            worker.ask(work="write", prompts=[[7]], new=4)
        assert worker.ask(work="write", prompts=[[5]], new=1)["ids"] == [[5]]
        state = Path(f"/proc/{worker.process.pid}/stat")
        if state.exists():
            deadline = time.monotonic() + 60
            while state.read_text().rsplit(")", 1)[1].split()[0] != "T":  # stopped
                assert time.monotonic() < deadline
                time.sleep(0.01)
    assert worker.process.returncode is not None


def test_cold_start_is_timed_and_the_reason_of_a_crash_reported(command: list[str]) -> None:
    assert 0 < cold_start([*command, "--cold", "Hi"], thread_environment(1)) < 60
    with pytest.raises(WorkerError, match="lost"):
        cold_start([sys.executable, "-c", "raise SystemExit('lost')"], {})
    with pytest.raises(WorkerError, match="exit status 1: ImportError: no such engine"):
        Worker([sys.executable, "-c", "raise ImportError('no such engine')"], {})


def test_prompts_never_share_a_first_token() -> None:
    prompts = cpu.Prompts(range(100))
    texts = [prompts.next(250) for _ in range(500)]
    assert {len(text) for text in texts} == {250}
    assert len({text[0] for text in texts}) == 500


def test_statistics() -> None:
    assert stats.paired_ratio([10, 30, None], [5, 10, 4]) == {"median": 2.5, "low": 2, "high": 3}
    assert stats.paired_ratio([], [1]) is None
    assert stats.median([None, 3.0, 1.0]) == 2.0 and stats.median([None]) is None
    assert stats.alternate(["a", "b"], 0) == ["a", "b"] and stats.alternate("ab", 1) == ["b", "a"]
    assert stats.roc_auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]) == 0.75
    assert stats.roc_auc([0, 0, 0, 0], [0, 1, 0, 1]) == 0.5
    assert stats.roc_auc([0.1, 0.4, 0.35, 0.8], [1, 0, 1, 0]) == 0.0
    assert cpu_bandwidth(1, 1, repeat=1) > 1e6
    assert report.table(["a", "b"], [[1, "x"]]) == "| a | b |\n|---|---|\n| 1 | x |"


def test_speeds_of_jobs() -> None:
    worker: Any = SimpleNamespace(ask=lambda **job: {"seconds": 3.0, "first_s": 1.0, "ids": []})
    assert cpu.measure(worker, "decode", [[1] * 32], 129) == 64.0  # the first token does not count
    assert cpu.measure(worker, "prompt", [[1] * 600], 1) == 200.0
    assert cpu.measure(worker, "batch", [[1]] * 3, 10) == 10.0


def test_divergence_is_zero_for_equal_logits() -> None:
    reference = np.log(np.array([[0.5, 0.5], [0.5, 0.5]]))
    other = np.log(np.array([[0.25, 0.75], [0.5, 0.5]]))
    assert cpu.compare(reference, reference + 3, [0, 1])[0] == pytest.approx(0)
    kl, agree, nll = cpu.compare(reference, other, [0, 1])
    assert kl == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75))
    assert agree == 0 and nll == pytest.approx(-np.log(0.75))


def test_the_table_lists_what_could_not_be_measured(tmp_path: Path) -> None:
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
    }
    table = cpu.markdown(json.loads(json.dumps(results)))
    assert "| slow | int4 | 45 (2.50x, 2.00 to 3.00) |" in table
    assert "gone: could not be measured: no wheel for this machine" in table
    assert "56%" in table  # 110 tokens/s x 102 MB of 20 GB/s
    assert "20.0 GB/s from 80 MB" in table
    cpu.draw(results, tmp_path)
    assert "not measured" in (tmp_path / "peers.svg").read_text()


def test_failed_installations_have_a_reason(tmp_path: Path) -> None:
    with pytest.raises(peers.UnavailableError, match="cannot be installed"):
        peers.run_command([sys.executable, "-c", "exit(1)"], "cannot be installed")
    peer = next(peer for peer in peers.PEERS if peer.key == "openvino")
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"weights")
    weights = tmp_path / "models" / f"7-{gguf.stat().st_mtime_ns}" / "hf" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.touch()
    with pytest.raises(peers.UnavailableError, match="converts nothing"):
        peers.install(peer, tmp_path, gguf, installed=True)


def test_a_file_is_quantized_once_for_each_version(tmp_path: Path, monkeypatch) -> None:
    commands: list[list[str]] = []

    def write(command: list[str], failure: str) -> None:
        commands.append(command)
        Path(command[4]).write_bytes(b"quantized")

    monkeypatch.setattr(peers, "run_command", write)
    gguf = tmp_path / "model.gguf"
    for content in (b"first", b"first", b"another"):
        if not gguf.exists() or gguf.read_bytes() != content:
            gguf.write_bytes(content)
        out = peers.quantize_gguf(gguf, "Q4_K_M", tmp_path, installed=True)
        assert out.name == "model-Q4_K_M.gguf" and out.read_bytes() == b"quantized"
    assert [command[5] for command in commands] == ["15", "15"]


def test_types_are_compared_where_llama_cpp_is(monkeypatch) -> None:
    for words, expected in (
        ([], ["Q4_0", "Q4_K_M", "Q8_0"]),
        (["--only", "onnxruntime"], []),
        (["--random", "1b"], ["Q4_0", "Q4_K_M", "Q8_0"]),
        (["--random", "qwen3.5-0.8b"], []),
        (["--types", "Q6_K"], ["Q6_K"]),
    ):
        monkeypatch.setattr(sys, "argv", ["cpu.py", *words])
        assert cpu.parse_arguments().types == expected


def test_selection_of_engines(run_bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert cpu.is_selected("us", ["llama_cpp"])
    assert cpu.is_selected("transformers_bf16", ["transformers"])
    assert not cpu.is_selected("openvino", ["llama_cpp"])
    with pytest.raises(SystemExit):
        run_bench(cpu, "--work", "dance")
    assert "'dance' is not one of decode" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(BENCH.glob("*.py")), ids=lambda script: script.stem)
def test_every_script_has_help(script: Path) -> None:
    if script.stem != "null_server":
        done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
        assert done.returncode == 0 and "usage:" in done.stdout, done.stderr
