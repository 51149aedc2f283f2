"""Data-parallel training with torchrun: DDP, or FSDP2 for models that do not fit one GPU.

    torchrun --nproc-per-node 8 -m unspool train --depth 20              each GPU has the model
    torchrun --nproc-per-node 8 -m unspool train --depth 32 --shard      each GPU has a shard of it

A single process uses the same code. Only rank 0 prints, and writes all files except the shards of a
sharded checkpoint.

Timeouts: within a step, a process that does not respond fails the run after `timeout` minutes.
While one process works and the others wait (reading text, writing a checkpoint), they wait up to a
day, but a process that died breaks its connection and fails the run immediately.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from unspool.errors import SettingsError, UnspoolError
from unspool.model.hub.find import runs_folder
from unspool.model.layers.transformer import Transformer
from unspool.train.learning.objectives import Objective
from unspool.train.running.runs import Run, RunError, process_start_time

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_POLL_STORE_S = 0.05
_REPLY_TIMEOUT_S = 2.0  # without a reply in this time, the attempt id is an old one


def join_processes(timeout: timedelta) -> tuple[Any, int, int]:
    """Meet the other processes; returns a store for this attempt, the rank and the world size."""
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    deadline = time.monotonic() + timeout.total_seconds()
    attempt = _admit_others(store, world, deadline) if rank == 0 else _join(store, rank, deadline)
    return dist.PrefixStore(attempt, store), rank, world  # type: ignore[attr-defined]


def _admit_others(store: Any, world: int, deadline: float) -> str:
    """Rank 0: publish the attempt id, and reply to every process that asks to join."""
    attempt = uuid.uuid4().hex
    store.set("unspool/life", attempt)
    missing = set(range(1, world))
    while missing:
        asking = {rank for rank in missing if store.check([f"{attempt}/asks/{rank}"])}
        for rank in asking:
            store.set(f"{attempt}/answer/{store.get(f'{attempt}/asks/{rank}').decode()}", "come in")
        missing -= asking
        _sleep_until(deadline, f"{len(missing)} of {world} processes are missing")
    return attempt


def _join(store: Any, rank: int, deadline: float) -> str:
    while True:
        _sleep_until(deadline, "the first process is missing")
        if not store.check(["unspool/life"]):
            continue
        attempt, request = str(store.get("unspool/life").decode()), uuid.uuid4().hex
        store.set(f"{attempt}/asks/{rank}", request)
        asked_at = time.monotonic()
        while time.monotonic() < asked_at + _REPLY_TIMEOUT_S:
            if store.check([f"{attempt}/answer/{request}"]):
                return attempt
            _sleep_until(deadline, "the first process does not reply")


def _sleep_until(deadline: float, reason: str) -> None:
    """Sleep a moment; fail after the deadline."""
    if time.monotonic() > deadline:
        raise dist.DistNetworkError(f"timed out: {reason}")
    time.sleep(_POLL_STORE_S)


_LONG_TIMEOUT = timedelta(days=1)
_START_TIMEOUT = timedelta(minutes=10)  # for all processes to start, even if a step's is shorter


class LostProcessError(UnspoolError):
    """Another training process died, does not respond, or failed."""


class Computation(nn.Module):
    """Forward pass from a batch to its loss: the module that DDP and FSDP wrap.

    Returns the loss summed over tokens, because the sums of several processes can be added.
    """

    def __init__(self, model: Transformer, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Any, rng: torch.Generator) -> tuple[Tensor, Tensor, dict[str, float]]:
        loss = self.objective(self.model, batch, rng)
        tokens = torch.as_tensor(loss.tokens, dtype=torch.float32, device=loss.mean.device)
        return loss.mean * tokens, tokens, loss.extra


@dataclass(frozen=True, slots=True)
class Parallel:
    """This process's place in a parallel training run."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    shard: bool = False  # FSDP2: weights, gradients and optimizer state are sharded
    long_group: Any = None  # process group with a long timeout, for work of one process

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @classmethod
    def single_process(cls, device: str = "auto") -> Parallel:
        """A single process, without torchrun."""
        return cls(_device(device, 0))

    @classmethod
    @contextmanager
    def from_environment(
        cls, device: str = "auto", *, shard: bool = False, timeout: float = 10
    ) -> Iterator[Parallel]:
        """Set up this process as torchrun's environment says, or a single one without torchrun."""
        place = _device(device, int(os.environ.get("LOCAL_RANK", "0")))
        if os.environ.get("RANK") is None:
            if shard:
                raise SettingsError("sharding needs several processes: torchrun -m unspool train")
            yield cls(place)
            return
        if place.type == "cuda":
            torch.cuda.set_device(place)
        backend, wait = "nccl" if place.type == "cuda" else "gloo", timedelta(minutes=timeout)
        try:
            store, rank, world = join_processes(max(wait, _START_TIMEOUT))
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
        except RuntimeError as error:
            raise process_lost(error) from error
        try:
            long_group = None
            if world > 1:
                long_group = dist.new_group(backend="gloo", timeout=_LONG_TIMEOUT)
            yield cls(place, rank, world, shard, long_group)
        finally:
            dist.destroy_process_group()

    def place(self, model: Transformer) -> Transformer:
        """Move the model to its device; FSDP moves a sharded one layer by layer."""
        return model if self.shard else model.to(self.device)

    def wrap(self, model: Transformer, objective: Objective) -> nn.Module:
        """The computation, with gradients summed over the processes."""
        computation = Computation(model, objective)
        if self.world_size == 1 and not self.shard:
            return computation
        if not self.shard:
            return DistributedDataParallel(
                computation, gradient_as_bucket_view=True, forward_sync_buffers=False
            )
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world_size,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(computation, mesh=mesh, reshard_after_forward=False)
        return computation

    def gradient_sync(self, computation: nn.Module, last: bool) -> Any:
        """Context of a batch: synchronize gradients only in the last batch of a step."""
        if self.shard:
            computation.set_requires_gradient_sync(last)  # type: ignore[operator]
            return nullcontext()
        if isinstance(computation, DistributedDataParallel) and not last:
            return computation.no_sync()
        return nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: dict[str, float]) -> list[dict[str, float]]:
        """Gather the dictionaries of all processes, by rank. Every process must call it."""
        if self.world_size == 1:
            return [value]
        content = json.dumps(value).encode()
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(content)
        sizes = self._sum_patiently(sizes)
        contents = torch.zeros(self.world_size, int(sizes.max()), dtype=torch.uint8)
        contents[self.rank, : len(content)] = torch.tensor(list(content), dtype=torch.uint8)
        rows = self._sum_patiently(contents).tolist()
        return [json.loads(bytes(r[: int(n)])) for r, n in zip(rows, sizes, strict=True)]

    def broadcast_str(self, text: str) -> str:
        """Return rank 0's text in all processes."""
        if self.world_size == 1:
            return text
        size = self._sum_patiently(torch.tensor([len(text.encode()) if self.is_first else 0]))
        content = torch.zeros(int(size), dtype=torch.uint8)
        if self.is_first:
            content = torch.tensor(list(text.encode()), dtype=torch.uint8)
        return bytes(self._sum_patiently(content).tolist()).decode()

    def wait(self) -> None:
        """Barrier: return when all processes have called it."""
        if self.world_size > 1:
            self._sum_patiently(torch.zeros(1))

    @contextmanager
    def all_succeed(self) -> Iterator[None]:
        """Barrier at the end of a block: fail in every process if the block failed in one."""
        if self.world_size == 1:
            yield
            return
        try:
            yield
        except BaseException:
            self._sum_patiently(torch.ones(1))
            raise
        if self._sum_patiently(torch.zeros(1)).item():
            raise LostProcessError("another process failed; its own message says why")

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """A block that rank 0 runs before the others."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()

    def _sum_patiently(self, values: Tensor) -> Tensor:
        """Sum over all processes with the long timeout."""
        try:
            dist.all_reduce(values, group=self.long_group)
        except RuntimeError as error:
            raise process_lost(error) from error
        return values


def is_process_lost(error: BaseException) -> bool:
    """Whether an error means that another process died or does not respond."""
    signs = ("connection", "timed out", "timeout", "broken pipe", "socket", "nccl", "gloo")
    message = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in message for sign in signs)
    )


def process_lost(error: BaseException) -> LostProcessError:
    line = re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", str(error)).partition("\n")[0]  # no C++ location
    reason = line.partition(". ")[0]
    return LostProcessError(
        f"another training process died or does not respond ({reason}); see its own output for "
        "the cause"
    )


def full_tensor(tensor: Tensor) -> Tensor:
    """The unsharded tensor; every process must call it."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def first_row(tensor: Tensor) -> int:
    """Index of this process's first row in the full tensor: FSDP shards rows evenly."""
    if not isinstance(tensor, DTensor):
        return 0
    mesh = tensor.device_mesh
    return min(len(tensor), mesh.get_local_rank() * -(-len(tensor) // mesh.size()))


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)


def job_facts(settings: DataclassInstance) -> dict[str, Any]:
    """The job entry of run.json; empty without torchrun."""
    job = _job_id()
    return {} if job is None else {"job": {"id": job, "asked": _as_json(settings)}}


def find_restarted_run(settings: DataclassInstance) -> Run | None:
    """The unfinished run that this job started before torchrun restarted it."""
    facts = job_facts(settings)
    if not facts:
        return None
    for run in Run.all(runs_folder()):
        if run.facts.get("job") == facts["job"] and run.state != "done":
            return run
    return None


def _job_id() -> str | None:
    """Id of the torchrun job: --rdzv-id, or the host and torchrun process."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None or name != "none":
        return name
    parent = os.getppid()
    return f"{socket.gethostname()} {parent} {process_start_time(parent)}"


def _as_json(settings: DataclassInstance) -> Any:
    """Settings as they look after a round trip through a file."""
    return json.loads(json.dumps(asdict(settings)))


def open_run_everywhere(folder: Path | None, parallel: Parallel) -> Run:
    """Open the first process's run in all processes; they must share the disk."""
    path = Path(parallel.broadcast_str("" if folder is None else str(folder.resolve())))
    with parallel.all_succeed():
        if not (path / "run.json").exists():
            raise RunError(
                f"{socket.gethostname()} cannot see {path}: set UNSPOOL_RUNS to a folder on a "
                "disk that all machines share"
            )
    return Run(folder if folder is not None else path)
