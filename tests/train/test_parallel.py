"""Two processes train what one does: DDP and FSDP2 over gloo, within rounding."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import CountingBatches, tiny_model

from unspool.train.learning.objectives import next_token
from unspool.train.learning.optimizers import Rates, make_optimizers
from unspool.train.running.loop import Trainer, TrainSettings
from unspool.train.running.runs import Run

HERE = Path(__file__).parent

# Both ways of training, and a sharded one that is stopped and gone on with, in one pair of
# processes: starting one takes longer than all of them.
WORKER = """
import sys
from pathlib import Path
from tiny_training import CountingBatches, save_model, tiny_model
from unspool.train.running.loop import Trainer, TrainSettings
from unspool.train.learning.objectives import next_token
from unspool.train.learning.optimizers import Rates, make_optimizers
from unspool.train.running.parallel import Parallel
from unspool.train.running.runs import Run

def train(folder, parallel, steps=99):
    if parallel.first and not (folder / "run.json").exists():
        Run.create(folder, "new", steps=8)
    parallel.wait()
    batches = CountingBatches(4, rank=parallel.rank, world=parallel.world)
    settings = TrainSettings(steps=8, warmup=2, save_every=4, accumulate=2)
    trainer = Trainer(
        tiny_model(), batches, next_token, lambda model: make_optimizers(model, Rates()),
        settings, Run(folder), save_model=save_model, parallel=parallel,
    )
    return trainer.run(lambda event: trainer.stop() if getattr(event, "step", 0) == steps else None)

from dataclasses import replace
root = Path(sys.argv[1])
with Parallel.started("cpu") as parallel:
    assert train(root / "whole", parallel).state == "done"
    parallel = replace(parallel, shard=True)
    assert train(root / "shard", parallel).state == "done"
    assert train(root / "resumed", parallel, steps=3).state == "stopped"
    assert train(root / "resumed", parallel).state == "done"
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of two processes each."""
    folder = tmp_path_factory.mktemp("runs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(folder)],
            env={
                **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "RANK": str(rank),
                "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in started:
        _, stderr = process.communicate(timeout=200)
        assert process.returncode == 0, stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    """What one process makes of the same rows, twice as many in each batch."""
    model = tiny_model()
    optimizers = make_optimizers(model, Rates())
    settings = TrainSettings(steps=8, warmup=2, accumulate=2)
    Trainer(model, CountingBatches(8), next_token, optimizers, settings).run()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["whole", "shard", "resumed"])
def test_two_processes_are_one(kind: str, runs: Path, alone: dict[str, torch.Tensor]):
    state = load_file(runs / kind / "checkpoints" / "000008" / "state" / "state.safetensors")
    for name, value in alone.items():
        assert torch.allclose(state[f"model.{name}"], value, atol=2e-4), name
    run = Run.open(runs / kind)
    assert [line["step"] for line in run.log()] == list(range(1, 9))
    assert run.log()[-1]["tokens"] == 8 * 2 * 8 * 16
