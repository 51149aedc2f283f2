"""Two processes (DDP and FSDP2 over gloo) train like one, within rounding, and each can resume the
runs of the other."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from two_processes import ODD

from helpers.tiny_training import CountingBatches, tiny_model
from helpers.tuned_together import KINDS, make_data, tuned
from unspool.errors import SettingsError
from unspool.model.files.checkpoint import load_transformer, open_checkpoint, save_weights
from unspool.train.learning.objectives import next_token
from unspool.train.learning.optimizers import Rates, make_optimizers
from unspool.train.running.checkpoints import read_state
from unspool.train.running.loop import Trainer, TrainSettings
from unspool.train.running.parallel import Parallel
from unspool.train.running.runs import Run, RunError
from unspool.train.tuning.tune import TuneSettings, _TuningJob

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks")


def trained_alone(folder: Path | None = None, steps: int = 99) -> dict[str, torch.Tensor]:
    """What one process makes of the same rows, twice as many in each batch."""
    model = tiny_model(**ODD)
    run = None
    if folder is not None:
        existing = (folder / "run.json").exists()
        run = Run.open(folder) if existing else Run.create(folder, "new", steps=8)
    trainer = Trainer(
        model, CountingBatches(8), next_token, make_optimizers(model, Rates()),
        TrainSettings(steps=8, warmup=2, accumulate=2), run,
        save_model=lambda weights, folder: save_weights(model.config, weights, folder),
    )  # fmt: skip
    trainer.run(lambda event: trainer.stop() if getattr(event, "step", 0) == steps else None)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two processes each."""
    folder = tmp_path_factory.mktemp("runs")
    trained_alone(folder / "more", steps=3)
    make_data(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [sys.executable, str(HERE / "two_processes.py"), str(folder)],
        env={
            **os.environ, "UNSPOOL_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{HERE}:{HERE.parent}", "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        },
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    return trained_alone()


@pytest.mark.parametrize("kind", ["whole", "shard", "resumed", "more"])
def test_two_processes_are_one(kind: str, runs: Path, alone: dict[str, torch.Tensor]):
    run = Run.open(runs / kind)
    assert run.final is not None
    result = load_transformer(open_checkpoint(run.final)).state_dict()
    for name, value in alone.items():
        assert torch.allclose(result[name], value, atol=2e-4), name
    assert [line["step"] for line in run.log() if "loss" in line] == list(range(1, 9))
    last = [line for line in run.log() if "loss" in line][-1]
    assert last["tokens"] == 8 * 2 * 8 * 16 and last["reward"] == 2.0


def test_each_process_writes_the_rows_it_has(runs: Path):
    assert _files(runs / "whole") == ["state.json", "state.safetensors"]
    parts = ["state-00001-of-00002.safetensors", "state-00002-of-00002.safetensors"]
    assert _files(runs / "shard") == [*parts, "state.json"]
    first_item, other = (load_file(_state(runs / "shard") / name) for name in parts)
    gate, counts = "model.layers.0.feed.gate.weight", "optimizer.0.step.embed.weight"
    assert (len(first_item[gate]), len(other[gate])) == (25, 24)
    assert counts in first_item and counts not in other  # what is alike everywhere is kept once
    complete = load_file(_state(runs / "whole") / "state.safetensors")
    for name in complete.keys() - {name for name in complete if ".step." in name}:
        assert torch.allclose(
            torch.cat((first_item[name], other[name])), complete[name], atol=2e-4
        ), name


def test_one_process_goes_on_with_what_two_began(runs: Path, alone: dict[str, torch.Tensor]):
    assert len(_files(runs / "fewer")) == 3
    result = trained_alone(runs / "fewer")
    for name, value in alone.items():
        assert torch.allclose(result[name], value, atol=2e-4), name


def test_a_part_that_is_not_there_is_named(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "shard", tmp_path / "torn")
    (_state(tmp_path / "torn") / "state-00002-of-00002.safetensors").unlink()
    with pytest.raises(RunError, match=r"state-00002-of-00002.safetensors is missing"):
        read_state(_state(tmp_path / "torn"), tiny_model(**ODD), [])


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_tune_as_one_does(
    kind: str, runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The rows of a batch are shared, so the number of processes changes nothing but rounding."""
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path))
    together, alone = Run.open(runs / "runs" / kind), tuned(runs, kind, f"{kind}-alone")
    assert together.final is not None and alone.final is not None
    names = [path.name for path in together.final.glob("*.safetensors")]
    assert len(names) == 1
    result, expected = (load_file(run.final / names[0]) for run in (together, alone))
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(result[name], value, atol=1e-4), name
    logs = [[line for line in run.log() if "loss" in line] for run in (together, alone)]
    assert [line["tokens"] > 0 for line in logs[0]] == [True] * 4
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


def _state(run: Path) -> Path:
    saved = Run.open(run).resumable_checkpoint()
    assert saved is not None
    return saved.folder / "state"


def _files(run: Path) -> list[str]:
    return sorted(path.name for path in _state(run).iterdir())
