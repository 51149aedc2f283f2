"""Everything that two processes do together, in one pair of them: starting one takes longest.

python two_processes.py FOLDER       with WORLD_SIZE, MASTER_ADDR and MASTER_PORT set
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import safetensors.torch  # noqa: F401  before the fork
import torch
import torch._dynamo  # before the fork too
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard  # noqa: F401  before the fork
from torch.distributed.tensor import Shard, distribute_tensor

from helpers import tuned_together
from helpers.tiny_training import Batch, CountingBatches, tiny_model
from unspool.model.files.checkpoint import save_weights
from unspool.model.layers.transformer import Transformer
from unspool.train.learning.objectives import Loss, next_token
from unspool.train.learning.optimizers import Rates, make_optimizers, orthogonal, orthogonalize
from unspool.train.running.loop import Trainer, TrainSettings
from unspool.train.running.parallel import Parallel
from unspool.train.running.runs import Run

# An odd number of matrices, with odd numbers of rows: neither can be shared evenly by two.
ODD = {"layers": 3, "ff_width": 49}


def turn(rank: int) -> None:
    """Matrices of more and of fewer rows than there are processes, spread over both."""
    mesh = init_device_mesh("cpu", (2,))
    for rows in (1, 3, 6):
        full = torch.randn(3, rows, 8, generator=torch.Generator().manual_seed(rows))
        result = orthogonalize([distribute_tensor(item, mesh, [Shard(0)]) for item in full])
        for own_value, expected in zip(result, orthogonal(full), strict=True):
            half = -(-rows // 2)
            assert torch.allclose(
                own_value, expected[rank * half : (rank + 1) * half], atol=1e-5
            ), rows


def train(folder: Path, parallel: Parallel, steps: int = 99) -> str:
    """Start or resume a run of eight steps, and stop it after `steps`."""
    if parallel.is_first and not (folder / "run.json").exists():
        Run.create(folder, "new", steps=8)
    parallel.wait()
    batches = CountingBatches(4, rank=parallel.rank, world=parallel.world_size)
    model = tiny_model(**ODD)

    def judge(model: Transformer) -> tuple[float, None]:  # has the weights whole for a moment
        return next_token(model, batches.batch(0), torch.Generator()).mean.item(), None

    def objective(model: Transformer, batch: Batch, rng: torch.Generator) -> Loss:
        """What only one process reports must not leave it waiting for the other."""
        loss = next_token(model, batch, rng)
        return replace(loss, extra={"reward": 2.0}) if parallel.is_first else loss

    trainer = Trainer(
        model, batches, objective, lambda model: make_optimizers(model, Rates()),
        TrainSettings(steps=8, warmup=2, save_every=4, accumulate=2), Run(folder),
        parallel=parallel, evaluate=judge,
        save_model=lambda weights, folder: save_weights(model.config, weights, folder),
    )  # fmt: skip
    return trainer.run(
        lambda event: trainer.stop() if getattr(event, "step", 0) == steps else None
    ).state


def main(root: Path) -> None:
    with Parallel.from_environment("cpu") as parallel:
        turn(parallel.rank)
        assert train(root / "whole", parallel) == "done"
        parallel = replace(parallel, shard=True)
        assert train(root / "shard", parallel) == "done"
        assert train(root / "resumed", parallel, steps=3) == "stopped"
        assert train(root / "resumed", parallel) == "done"
        assert train(root / "fewer", parallel, steps=3) == "stopped"
        assert train(root / "more", parallel) == "done"
        for name, (_, shard) in tuned_together.KINDS.items():
            parallel = replace(parallel, shard=shard)
            assert tuned_together.tuned(root, name, name, parallel).state == "done"


if __name__ == "__main__":
    other = os.fork()  # the second process need not import all this again
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(int(other == 0))
    main(Path(sys.argv[1]))
    if other:
        assert os.waitpid(other, 0)[1] == 0
