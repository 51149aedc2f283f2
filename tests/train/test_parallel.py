"""Training in child processes: killed at any moment a run is resumed bit for bit, two processes
(DDP and FSDP2 over gloo) train like one, within rounding, and a lost process is replaced."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from child_processes import KINDS, ODD, STEPS, make_data, train, tuned
from safetensors.torch import load_file
from test_train_command import SMALL, TEXT, losses

from helpers.tiny_training import tiny_model, tiny_trainer
from unspool.cli.main import _exit_code
from unspool.errors import SettingsError
from unspool.train.running.checkpoints import read_state
from unspool.train.running.parallel import Parallel
from unspool.train.running.runs import Run, RunError
from unspool.train.tuning.tune import TuneSettings, _TuningJob

HERE = Path(__file__).parent
WORDS = ["train", "speeches.txt", *SMALL, "--steps", "6", "--save-every", "2", "--device", "cpu"]
ALONE = Parallel.single_process("cpu")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks")


class Children:
    """A process whose children train, in `folder`; see child_processes.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {
            **os.environ, "UNSPOOL_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(HERE.parent),
        }  # fmt: skip
        environment.pop("UNSPOOL_RUNS", None)
        words = [str(folder), *WORDS, "--shard", "--timeout", "0.15"]
        with (folder / "stderr").open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "child_processes.py"), *words],
                env=environment, stderr=stderr, start_new_session=True,
            )  # fmt: skip

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def wait_until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 250
        while not (value := condition()):
            is_over = self.process.poll() is not None or time.monotonic() > deadline
            assert not is_over, self.stderr()[-3000:]
            time.sleep(0.05)
        return value


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    folder = tmp_path_factory.mktemp("children")
    assert train(folder / "more", ALONE, stop_after=2) == "stopped"
    make_data(folder)
    (folder / "torchrun").mkdir()
    (folder / "torchrun" / "speeches.txt").write_text(TEXT)
    result = Children(folder)
    yield result
    if result.process.poll() is None:
        os.killpg(result.process.pid, signal.SIGKILL)
    result.process.wait()


def test_killed_at_any_moment(children: Children, tmp_path: Path):
    tiny_trainer(tmp_path, STEPS, save_every=2, accumulate=2).run()
    done = children.folder / "killed.done"
    children.wait_until(done.exists)
    assert int(done.read_text()) >= 3, "deaths"
    killed = children.folder / "killed"
    last = Path("checkpoints", f"{STEPS:06}")
    for name in ("model.safetensors", "state/state.safetensors"):
        expected, tensors = (load_file(folder / last / name) for folder in (tmp_path, killed))
        assert expected.keys() == tensors.keys()
        for key, value in expected.items():  # torch's last digit may depend on where memory lies
            assert torch.allclose(tensors[key], value, rtol=1e-4, atol=1e-6), (name, key)
    first, other = (Run.open(folder) for folder in (tmp_path, killed))
    assert first.checkpoints()[-1].tokens == other.checkpoints()[-1].tokens
    steps, losses = (
        [[line[key] for line in run.log()] for run in (first, other)] for key in ("step", "loss")
    )
    assert steps[0] == steps[1] and losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.fixture(scope="module")
def runs(children: Children) -> Path:
    """Runs of two processes each, and "alone", the same run of one process."""
    assert train(children.folder / "alone", ALONE) == "done"
    children.wait_until((children.folder / "together.done").exists)
    return children.folder


@pytest.mark.parametrize("kind", ["whole", "resumed", "more", "fewer"])
def test_two_processes_are_one(kind: str, runs: Path):
    if kind == "fewer":  # one process resumes the run of two
        assert len(_state_files(runs / kind)) == 3
        assert train(runs / kind, ALONE) == "done"
    result, expected = (_weights(Run.open(runs / name)) for name in (kind, "alone"))
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(result[name], value, atol=2e-4), name
    lines = [line for line in Run.open(runs / kind).log() if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["tokens"] == STEPS * 2 * 8 * 16 and lines[-1]["reward"] == 2.0


def test_each_process_writes_the_rows_it_has(runs: Path, tmp_path: Path):
    assert _state_files(runs / "whole") == ["state.json", "state.safetensors"]
    parts = ["state-00001-of-00002.safetensors", "state-00002-of-00002.safetensors"]
    assert _state_files(runs / "resumed") == [*parts, "state.json"]
    first, second = (load_file(_state(runs / "resumed") / name) for name in parts)
    gate, counts = "model.layers.0.feed.gate.weight", "optimizer.0.step.embed.weight"
    assert (len(first[gate]), len(second[gate])) == (25, 24)
    assert counts in first and counts not in second  # what is alike everywhere is kept once
    complete = load_file(_state(runs / "whole") / "state.safetensors")
    for name, value in complete.items():
        if ".step." not in name:
            assert torch.allclose(torch.cat((first[name], second[name])), value, atol=2e-4), name
    shutil.copytree(runs / "resumed", tmp_path / "torn")
    (_state(tmp_path / "torn") / parts[1]).unlink()
    with pytest.raises(RunError, match=r"state-00002-of-00002.safetensors is missing"):
        read_state(_state(tmp_path / "torn"), tiny_model(**ODD), [])


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_tune_as_one_does(
    kind: str, runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The rows of a batch are shared, so the number of processes changes nothing but rounding."""
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path))
    together, alone = Run.open(runs / "runs" / kind), tuned(runs, kind, f"{kind}-alone")
    result, expected = _weights(together), _weights(alone)
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(result[name], value, atol=1e-4), name
    logs = [[line for line in run.log() if "loss" in line] for run in (together, alone)]
    assert [line["tokens"] > 0 for line in logs[0]] == [True] * 2
    for actual, reference in zip(*logs, strict=True):
        assert actual["loss"] == pytest.approx(reference["loss"], abs=1e-4)
        for key in {"reward", "accuracy", "margin"} & actual.keys():
            assert actual[key] == pytest.approx(reference[key], abs=1e-3)


def test_what_cannot_be_shared_is_said(runs: Path):
    parallel = Parallel(torch.device("cpu"), world_size=3)
    with pytest.raises(SettingsError, match="--batch 4 must be a multiple of the 3 processes"):
        _TuningJob._share(SimpleNamespace(parallel=parallel), 4, "--batch")
    sharded = Parallel(torch.device("cpu"), world_size=2, shard=True)
    settings = TuneSettings(kind="grpo", data=("x",), judge="a:b")
    with pytest.raises(SettingsError, match="leave out --shard"):
        _TuningJob(settings, Run(runs), sharded)


def test_a_process_is_lost_and_nothing_else(children: Children, monkeypatch: pytest.MonkeyPatch):
    """Two processes, each with a part of the model. One stops answering between two checkpoints:
    the other says so. Then it dies: both are started again, and what comes out is what one
    undisturbed process makes."""
    monkeypatch.chdir(children.folder / "torchrun")
    monkeypatch.setenv("UNSPOOL_CACHE", str(children.folder / "cache"))
    monkeypatch.delenv("UNSPOOL_RUNS", raising=False)
    children.wait_until(lambda: "resume from it" in children.stderr())
    output = " ".join(children.stderr().split())
    assert "died or does not respond" in output, output[-3000:]
    assert "the checkpoint of step 4 is intact" in output
    (run,) = Run.all("runs")
    assert run.facts["state"] == "failed"
    (stopped,) = children.wait_until(lambda: _stopped_children(children.process.pid))
    os.kill(stopped, signal.SIGKILL)
    assert children.process.wait(timeout=200) == 0, children.stderr()[-3000:]
    (run,) = Run.all("runs")  # the restarted job resumed its run
    assert run.state == "done" and run.folder.name == "speeches-d1"
    assert [line["step"] for line in run.log() if "loss" in line] == list(range(1, 7))
    saved = run.resumable_checkpoint()
    assert saved is not None and len(list((saved.folder / "state").glob("*-of-00002.*"))) == 2
    assert _exit_code([*WORDS, "--name", "alone", "--quiet"]) == 0
    alone = Run.open("alone")
    assert losses(run) == pytest.approx(losses(alone), abs=1e-3)
    result, expected = _weights(run), _weights(alone)
    for name, value in expected.items():
        assert torch.allclose(result[name], value, atol=2e-3), name


def _stopped_children(parent: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=,stat=", "--ppid", str(parent)], capture_output=True, text=True
    ).stdout.splitlines()
    rows = [line.split() for line in listed]
    return [int(pid) for pid, state in rows if state.startswith("T")]


def _weights(run: Run) -> dict[str, torch.Tensor]:
    assert run.final is not None
    (file,) = run.final.glob("*.safetensors")
    return load_file(file)


def _state(run: Path) -> Path:
    saved = Run.open(run).resumable_checkpoint()
    assert saved is not None
    return saved.folder / "state"


def _state_files(run: Path) -> list[str]:
    return sorted(path.name for path in _state(run).iterdir())
