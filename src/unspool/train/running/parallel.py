"""Several processes training one model, started by torchrun: DDP, or FSDP2 for what is too large.

    torchrun --nproc-per-node 8 -m unspool train --depth 20              every GPU has the model
    torchrun --nproc-per-node 8 -m unspool train --depth 32 --shard      every GPU has a part of it

A process alone goes through the same code. Only the first process speaks, and writes all files but
the parts of a sharded checkpoint.

Nobody waits forever. Within a step a process that does not answer is given up after `timeout`
minutes; where one works and the others wait (text is read, a checkpoint is written) they wait
for a day, but not for one that is gone: its connection breaks, and that is told at once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from unspool.errors import SettingsError, UnspoolError
from unspool.model.transformer import Transformer
from unspool.train.learning.objectives import Objective
from unspool.train.running.meeting import meet

_PATIENCE = timedelta(days=1)
_BEGINNING = timedelta(minutes=10)  # in which all must have come, however short a step's limit is


class LostProcessError(UnspoolError):
    """Another process of the training is gone, does not answer, or could not do its part."""


class Computation(nn.Module):
    """From a batch to its loss: the one forward pass that DDP and FSDP know of.

    Gives the loss summed over its tokens, because sums of several processes can be added.
    """

    def __init__(self, model: Transformer, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Any, rng: torch.Generator) -> tuple[Tensor, Tensor, dict[str, float]]:
        loss = self.objective(self.model, batch, rng)
        tokens = torch.as_tensor(loss.tokens, dtype=torch.float32, device=loss.total.device)
        return loss.total * tokens, tokens, loss.extra


@dataclass(frozen=True, slots=True)
class Parallel:
    """This process among those that train together."""

    device: torch.device
    rank: int = 0
    world: int = 1
    shard: bool = False  # FSDP2: weights, gradients and optimizer spread over all
    patient: Any = None  # the group in which processes wait for one that has long work to do

    @property
    def first(self) -> bool:
        return self.rank == 0

    @classmethod
    def alone(cls, device: str = "auto") -> Parallel:
        """One process, not started by torchrun."""
        return cls(_device(device, 0))

    @classmethod
    @contextmanager
    def started(
        cls, device: str = "auto", *, shard: bool = False, timeout: float = 10
    ) -> Iterator[Parallel]:
        """What torchrun says of this process, or a process alone; ended with the block."""
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
            store, rank, world = meet(max(wait, _BEGINNING))
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
        except RuntimeError as error:
            raise lost(error) from error
        try:
            patient = dist.new_group(backend="gloo", timeout=_PATIENCE) if world > 1 else None
            yield cls(place, rank, world, shard, patient)
        finally:
            dist.destroy_process_group()

    def place(self, model: Transformer) -> Transformer:
        """The model where it is trained; one that is sharded goes there layer by layer."""
        return model if self.shard else model.to(self.device)

    def wrap(self, model: Transformer, objective: Objective) -> nn.Module:
        """The computation, its gradients joined over the processes."""
        computation = Computation(model, objective)
        if self.world == 1 and not self.shard:
            return computation
        if not self.shard:
            return DistributedDataParallel(
                computation, gradient_as_bucket_view=True, forward_sync_buffers=False
            )
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(computation, mesh=mesh, reshard_after_forward=False)
        return computation

    def joined(self, computation: nn.Module, last: bool) -> Any:
        """Within: whether the gradients of this batch are sent, or wait for those of the next."""
        if self.shard:
            computation.set_requires_gradient_sync(last)  # type: ignore[operator]
            return nullcontext()
        if isinstance(computation, DistributedDataParallel) and not last:
            return computation.no_sync()
        return nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        """Numbers added up over all processes."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: dict[str, float]) -> list[dict[str, float]]:
        """The dictionaries of all processes, by rank. Every process must call it."""
        if self.world == 1:
            return [value]
        texts = json.dumps(value).encode()
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(texts)
        sizes = self._joined(sizes)
        letters = torch.zeros(self.world, int(sizes.max()), dtype=torch.uint8)
        letters[self.rank, : len(texts)] = torch.tensor(list(texts), dtype=torch.uint8)
        rows = self._joined(letters).tolist()
        return [json.loads(bytes(r[: int(n)])) for r, n in zip(rows, sizes, strict=True)]

    def told(self, text: str) -> str:
        """What the first process says, on all of them."""
        if self.world == 1:
            return text
        size = self._joined(torch.tensor([len(text.encode()) if self.first else 0]))
        letters = torch.zeros(int(size), dtype=torch.uint8)
        if self.first:
            letters = torch.tensor(list(text.encode()), dtype=torch.uint8)
        return bytes(self._joined(letters).tolist()).decode()

    def wait(self) -> None:
        """Until all are here."""
        if self.world > 1:
            self._joined(torch.zeros(1))

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Gone on from only if all processes came through the block."""
        if self.world == 1:
            yield
            return
        try:
            yield
        except BaseException:
            self._joined(torch.ones(1))
            raise
        if self._joined(torch.zeros(1)).item():
            raise LostProcessError("another process could not do its part; its words say why")

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """A block that the first process goes through before the others do."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()

    def _joined(self, values: Tensor) -> Tensor:
        """Numbers added up, however long the others work before they come to it."""
        try:
            dist.all_reduce(values, group=self.patient)
        except RuntimeError as error:
            raise lost(error) from error
        return values


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another process is gone or does not answer."""
    known = ("connection", "timed out", "timeout", "broken pipe", "socket", "nccl", "gloo")
    words = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in words for word in known)
    )


def lost(error: BaseException) -> LostProcessError:
    first = re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", str(error)).partition("\n")[0]  # no place in gloo
    why = first.partition(". ")[0]
    return LostProcessError(
        f"another process of this training is gone or does not answer ({why}); its own words, if "
        "it had any, say why"
    )


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor on this process; every process must ask."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def first_row(tensor: Tensor) -> int:
    """Where in the whole tensor the rows of this process begin: FSDP gives each as many."""
    if not isinstance(tensor, DTensor):
        return 0
    mesh = tensor.device_mesh
    return min(len(tensor), mesh.get_local_rank() * -(-len(tensor) // mesh.size()))


def _device(wanted: str, local_rank: int) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda":
        return torch.device("cuda", local_rank)
    return torch.device(wanted)
