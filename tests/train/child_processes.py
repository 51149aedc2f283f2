"""Processes that train: killed ones, two together, and two under torchrun of which one is lost.

All are forks of one process: importing torch takes longest. A file says when a part is done.

python child_processes.py FOLDER WORD...        the words of the command under torchrun
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import unspool.train.running.loop as loop
from helpers import tiny
from helpers.tiny_training import Batch, CountingBatches, tiny_model, tiny_trainer
from unspool.cli.main import _exit_code
from unspool.model.files.checkpoint import save_weights
from unspool.model.layers.transformer import Transformer
from unspool.train.data.tokenizer import TokenizerSettings, save_tokenizer_files, train_bpe
from unspool.train.learning.objectives import Loss, next_token
from unspool.train.learning.optimizers import Rates, make_optimizers, orthogonal, orthogonalize
from unspool.train.running.loop import Trainer, TrainSettings
from unspool.train.running.parallel import Parallel
from unspool.train.running.runs import Run
from unspool.train.tuning.tune import TuneSettings, new_run, tune

# An odd number of matrices, with odd numbers of rows: neither can be shared evenly by two.
ODD = {"layers": 3, "ff_width": 49}
STEPS = 4

# Name -> settings, and whether two processes are to have a part of the model each.
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "lora": ({"lora": 4}, False),
    "all-shard": ({"lora": 0, "rate": 1e-3}, True),
    "dpo-shard": ({"kind": "dpo", "lora": 4, "data": "pairs"}, True),
    "grpo": (
        {
            "kind": "grpo", "lora": 4, "data": "asked", "judge": "child_processes:judge",
            "groups": 2, "answers": 2, "max_tokens": 4,
        },
        False,
    ),
}  # fmt: skip


if __name__ == "__main__":  # so that no child has to import them; dynamo takes seconds
    import safetensors.torch  # noqa: F401
    import torch._dynamo
    from torch.distributed.fsdp import fully_shard  # noqa: F401
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    import unspool.cli.train.display
    import unspool.train.pretrain  # noqa: F401


def fork(function: Callable[..., None], *arguments: Any) -> int:
    """Run a function in a child process; the process id."""
    pid = os.fork()
    if pid == 0:
        try:
            function(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


# -- Killed at any moment --------------------------------------------------------------------------


def train_and_die(folder: Path, num_calls: int) -> None:
    """Start or resume a run; kill the process at the n-th call that touches files or starts a
    step."""
    remaining = iter(range(num_calls - 1))

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(remaining, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in ("fsync", "rename", "replace", "unlink", "mkdir"):
        setattr(os, name, deadly(getattr(os, name)))
    loop.set_rates = deadly(loop.set_rates)
    tiny_trainer(folder, STEPS, save_every=2, accumulate=2).run()


def train_in_many_lives(root: Path) -> int:
    """Train until a life comes to the end; the number of deaths."""
    rng, deaths = random.Random(1), 0
    while True:
        pid = fork(train_and_die, root / "killed", rng.randrange(8, 60))
        status = os.waitpid(pid, 0)[1]
        if status == 0:
            return deaths
        deaths += 1
        assert status == signal.SIGKILL and deaths < 100
        for saved in (root / "killed" / "checkpoints").glob("[0-9]*"):
            assert (saved / "model.safetensors").exists() and (saved / "training.json").exists()


# -- Two together ----------------------------------------------------------------------------------


def orthogonalize_shards(rank: int) -> None:
    """Matrices of more and of fewer rows than there are processes, spread over both."""
    mesh = init_device_mesh("cpu", (2,))
    for rows in (1, 3, 6):
        full = torch.randn(3, rows, 8, generator=torch.Generator().manual_seed(rows))
        result = orthogonalize([distribute_tensor(item, mesh, [Shard(0)]) for item in full])
        half = -(-rows // 2)
        for shard, expected in zip(result, orthogonal(full), strict=True):
            local_rows = expected[rank * half : (rank + 1) * half]
            assert torch.allclose(shard, local_rows, atol=1e-5), rows


def train(folder: Path, parallel: Parallel, stop_after: int = STEPS) -> str:
    """Start or resume a run, alone or with another process; its state at the end."""
    if parallel.is_first and not (folder / "run.json").exists():
        Run.create(folder, "new", steps=STEPS)
    parallel.wait()
    world_size = parallel.world_size
    batches = CountingBatches(8 // world_size, rank=parallel.rank, world=world_size)
    model = tiny_model(**ODD)

    def evaluate(model: Transformer) -> tuple[float, None]:  # has the weights whole for a moment
        return next_token(model, batches.batch(0), torch.Generator()).mean.item(), None

    def objective(model: Transformer, batch: Batch, rng: torch.Generator) -> Loss:
        """What only one process reports must not leave it waiting for the other."""
        loss = next_token(model, batch, rng)
        return replace(loss, extra={"reward": 2.0}) if parallel.is_first else loss

    trainer = Trainer(
        model, batches, objective, lambda model: make_optimizers(model, Rates()),
        TrainSettings(steps=STEPS, warmup=1, save_every=2, accumulate=2), Run(folder),
        parallel=parallel, evaluate=evaluate,
        save_model=lambda weights, folder: save_weights(model.config, weights, folder),
    )  # fmt: skip
    return trainer.run(
        lambda event: trainer.stop() if getattr(event, "step", 0) == stop_after else None
    ).state


def judge(prompt: str, answer: str, row: dict[str, Any]) -> float:
    return sum(letter < "a" for letter in answer) / max(1, len(answer))


def make_data(folder: Path) -> None:
    """A tiny model with a vocabulary of bytes, and something to learn for each kind of tuning."""
    tiny.save("llama", folder / "model")
    settings = TokenizerSettings(vocab_size=259)
    save_tokenizer_files(train_bpe([], settings), settings, folder / "model")
    numbers = range(24)
    rows = {
        "answered": [{"prompt": f"number {n}", "completion": "x" * (n % 5 + 1)} for n in numbers],
        "pairs": [{"prompt": f"n {n}", "chosen": "yes", "rejected": "no way"} for n in numbers],
        "asked": [{"prompt": f"n {n}"} for n in numbers],
    }
    for name, content in rows.items():
        lines = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{name}.jsonl").write_text(lines)


def tuned(folder: Path, kind: str, name: str, parallel: Parallel | None = None) -> Run:
    """One tuning of two steps, in runs/NAME."""
    changes: dict[str, Any] = {"data": "answered", "rate": 1e-2, **KINDS[kind][0]}
    data = (str(folder / f"{changes.pop('data')}.jsonl"),)
    settings = TuneSettings(
        model=str(folder / "model"), data=data, batch=4, length=64, steps=2, save_every=2,
        device="cpu", **changes,
    )  # fmt: skip
    where = folder / "runs" / name
    if parallel is None or parallel.is_first:
        new_run(settings, where)
    if parallel is not None:
        parallel.wait()
    return tune(settings, Run(where), parallel=parallel)


def train_together(root: Path, rank: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    with Parallel.from_environment("cpu") as parallel:
        orthogonalize_shards(parallel.rank)
        assert train(root / "whole", parallel) == "done"
        parallel = replace(parallel, shard=True)
        assert train(root / "fewer", parallel, stop_after=2) == "stopped"
        if parallel.is_first:
            shutil.copytree(root / "fewer", root / "resumed")
        assert train(root / "resumed", parallel) == "done"
        assert train(root / "more", parallel) == "done"
        for name, (_, shard) in KINDS.items():
            parallel = replace(parallel, shard=shard)
            assert tuned(root, name, name, parallel).state == "done"


# -- Under torchrun --------------------------------------------------------------------------------


def run_command(words: list[str]) -> None:
    """The command; in its first life the second process stops answering in step 5."""
    steps, set_rates = 0, loop.set_rates

    def stop_in_a_step(*arguments: Any) -> None:
        nonlocal steps
        steps += 1
        is_first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if steps == 5 and os.environ["RANK"] == "1" and is_first_life:
            os.kill(os.getpid(), signal.SIGSTOP)
        set_rates(*arguments)

    loop.set_rates = stop_in_a_step
    if code := _exit_code(words):
        sys.exit(code)


def main(root: Path, words: list[str]) -> None:
    (root / "killed.done").write_text(str(train_in_many_lives(root)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = [fork(train_together, root, rank, port) for rank in range(2)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    (root / "together.done").touch()
    # What torchrun does, but with forks.
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="a-job", max_restarts=1,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork", monitor_interval=0.1,
    )  # fmt: skip
    os.chdir(root / "torchrun")
    elastic_launch(config, run_command)(words)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
