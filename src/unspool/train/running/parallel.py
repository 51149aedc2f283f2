"""Several processes training one model, started by torchrun: DDP, or FSDP2 for what is too large.

    torchrun --nproc-per-node 8 -m unspool train --depth 20              every GPU has the model
    torchrun --nproc-per-node 8 -m unspool train --depth 32 --shard      every GPU has a part of it

A process alone goes through the same code. Only the first process writes files and speaks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from unspool.errors import SettingsError
from unspool.model.transformer import Transformer
from unspool.train.learning.objectives import Objective


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

    @property
    def first(self) -> bool:
        return self.rank == 0

    @classmethod
    def alone(cls, device: str = "auto") -> Parallel:
        """One process, not started by torchrun."""
        return cls(_device(device, 0))

    @classmethod
    @contextmanager
    def started(cls, device: str = "auto", *, shard: bool = False) -> Iterator[Parallel]:
        """What torchrun says of this process, or a process alone; ended with the block."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        place = _device(device, int(os.environ.get("LOCAL_RANK", "0")))
        if "RANK" not in os.environ:
            if shard:
                raise SettingsError("sharding needs several processes: torchrun -m unspool train")
            yield cls(place)
            return
        if place.type == "cuda":
            torch.cuda.set_device(place)
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
        try:
            yield cls(place, dist.get_rank(), world, shard)
        finally:
            dist.destroy_process_group()

    def wrap(self, model: Transformer, objective: Objective) -> nn.Module:
        """The computation, its gradients joined over the processes."""
        computation = Computation(model, objective)
        if self.world == 1 and not self.shard:
            return computation
        if not self.shard:
            return DistributedDataParallel(
                computation, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(computation, reshard_after_forward=False)
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

    def told(self, text: str) -> str:
        """What the first process says, on all of them."""
        if self.world == 1:
            return text
        size = self.sum(torch.tensor([len(text.encode()) if self.first else 0]).to(self.device))
        letters = torch.zeros(int(size), dtype=torch.uint8)
        if self.first:
            letters = torch.tensor(list(text.encode()), dtype=torch.uint8)
        return bytes(self.sum(letters.to(self.device)).tolist()).decode()

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor on this process; every process must ask."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def put(target: Tensor, values: Tensor) -> None:
    """Fill a tensor, or this process's part of it."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            values = distribute_tensor(
                values.to(target.device), target.device_mesh, target.placements, src_data_rank=None
            )
        target.copy_(values)


def _device(wanted: str, local_rank: int) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda":
        return torch.device("cuda", local_rank)
    return torch.device(wanted)
