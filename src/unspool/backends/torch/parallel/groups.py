"""What ranks send each other: bytes from the first to all, and sums of numbers on their devices.

Groups of our own, apart from the one that `torch.distributed` keeps for a whole process, which may
be somebody else's (a training's), and of which there is only one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from unspool.model.split import Share

dist: Any = torch.distributed  # whose types leave out half of it
Store = Any

_IDLE = timedelta(days=3650)  # nobody may ask for anything for long
_STEP = timedelta(seconds=60)  # that ranks wait for each other within a step
_FIRST = 16 << 10  # bytes that are sent at once: a step of many texts fits
_LENGTH = 8  # of them say how many there are


class Groups:
    """One group that tells, over gloo, and one that computes, over NCCL where each rank has a GPU
    of its own. `address`: they are on one machine, and nobody else can reach them there."""

    def __init__(
        self, store: Store, share: Share, device: torch.device, *, nccl: bool, address: str | None
    ) -> None:
        def gloo(name: str, timeout: timedelta) -> Any:
            make = dist.ProcessGroupGloo
            options = make._Options()
            here = make.create_device(hostname=address) if address else make.create_default_device()
            options._devices, options._timeout = [here], timeout
            return make(dist.PrefixStore(name, store), share.rank, share.ranks, options)

        self._first, self._count, self._nccl = share.rank == 0, share.ranks, nccl
        self._control = gloo("control", _IDLE)
        if not nccl:
            self._compute = gloo("compute", _STEP)
            return
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _STEP
        place = dist.PrefixStore("compute", store)
        self._compute = dist.ProcessGroupNCCL(place, share.rank, share.ranks, options)

    # -- bytes -------------------------------------------------------------------------------

    def tell(self, content: bytes) -> None:
        """From the first rank to all others: in one go, unless it is long."""
        whole = len(content).to_bytes(_LENGTH, "little") + content
        for part in (whole[:_FIRST].ljust(_FIRST, b"\0"), whole[_FIRST:]):
            if part:
                self._broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8))

    def hear(self) -> bytes:
        """What the first rank tells next."""
        first = torch.empty(_FIRST, dtype=torch.uint8)
        self._broadcast(first)
        whole = first.numpy().tobytes()
        length = _LENGTH + int.from_bytes(whole[:_LENGTH], "little")
        if length > _FIRST:
            rest = torch.empty(length - _FIRST, dtype=torch.uint8)
            self._broadcast(rest)
            whole += rest.numpy().tobytes()
        return whole[_LENGTH:length]

    def _broadcast(self, content: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._control.broadcast([content], options).wait()

    def least(self, *numbers: int) -> list[int]:
        """The smallest that any rank gives of each number; waits for all of them, however long."""
        given = torch.tensor(numbers)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._control.allreduce([given], options).wait()
        return [int(number) for number in given]

    # -- numbers, on the devices ---------------------------------------------------------------

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same to the last bit on each of them."""
        x = x.contiguous()
        self._compute.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """What every rank gives, which must be of one shape, on the first; empty on the others."""
        sent = x.contiguous() if self._nccl else x.contiguous().cpu()
        into = [torch.empty_like(sent) for _ in range(self._count if self._first else 0)]
        options = dist.GatherOptions()
        options.rootRank = 0
        self._compute.gather([into] if into else [], [sent], options).wait()
        return [one.to(x.device) for one in into]

    def abort(self) -> None:
        """End a wait for a rank that is gone. Gloo sees that by itself."""
        if self._nccl:
            self._compute.abort()
