"""Communication between ranks: bytes from rank 0 to all, and tensor collectives on their devices.

The process groups are separate from the default group of `torch.distributed`: a process has only
one of those, and a training run may use it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from unspool.model.split import TensorParallelRank

dist: Any = torch.distributed  # Any: its type stubs are incomplete
Store = Any

_IDLE_TIMEOUT = timedelta(days=3650)  # there may be no request for a long time
_STEP_TIMEOUT = timedelta(seconds=60)  # for other ranks within a step
_FIRST_BYTES = 16 << 10  # sent in the first broadcast: enough for a step of many sequences
_LENGTH_BYTES = 8  # length prefix of a message


class RankGroups:
    """A control group over gloo, and a compute group, over NCCL where each rank has a separate GPU.

    `address`: bind to this address, which only processes of this machine can reach.
    """

    def __init__(
        self,
        store: Store,
        share: TensorParallelRank,
        device: torch.device,
        *,
        nccl: bool,
        address: str | None,
    ) -> None:
        def gloo(name: str, timeout: timedelta) -> Any:
            make = dist.ProcessGroupGloo
            options = make._Options()
            network = make.create_default_device()
            if address:
                network = make.create_device(hostname=address)
            options._devices, options._timeout = [network], timeout
            return make(dist.PrefixStore(name, store), share.rank, share.ranks, options)

        self._is_rank_zero, self._world_size, self._nccl = share.rank == 0, share.ranks, nccl
        self._control = gloo("control", _IDLE_TIMEOUT)
        if not nccl:
            self._compute = gloo("compute", _STEP_TIMEOUT)
            return
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _STEP_TIMEOUT
        prefixed = dist.PrefixStore("compute", store)
        self._compute = dist.ProcessGroupNCCL(prefixed, share.rank, share.ranks, options)

    # -- bytes -------------------------------------------------------------------------------

    def send(self, content: bytes) -> None:
        """Send bytes from rank 0 to all others: one broadcast, or two if they are long."""
        frame = len(content).to_bytes(_LENGTH_BYTES, "little") + content
        for part in (frame[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0"), frame[_FIRST_BYTES:]):
            if part:
                self._broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8))

    def receive(self) -> bytes:
        """Wait for the next bytes from rank 0."""
        first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
        self._broadcast(first)
        frame = first.numpy().tobytes()
        length = _LENGTH_BYTES + int.from_bytes(frame[:_LENGTH_BYTES], "little")
        if length > _FIRST_BYTES:
            remainder = torch.empty(length - _FIRST_BYTES, dtype=torch.uint8)
            self._broadcast(remainder)
            frame += remainder.numpy().tobytes()
        return frame[_LENGTH_BYTES:length]

    def _broadcast(self, content: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._control.broadcast([content], options).wait()

    def minimum(self, *numbers: int) -> list[int]:
        """Elementwise minimum over all ranks; waits for all of them without a time limit."""
        tensor = torch.tensor(numbers)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._control.allreduce([tensor], options).wait()
        return [int(number) for number in tensor]

    # -- tensors, on the devices ---------------------------------------------------------------

    def sum(self, x: Tensor) -> Tensor:
        """Sum over all ranks, bit-identical on each of them."""
        x = x.contiguous()
        self._compute.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Gather tensors of one shape from all ranks on rank 0; empty on the others."""
        source = x.contiguous() if self._nccl else x.contiguous().cpu()
        count = self._world_size if self._is_rank_zero else 0
        targets = [torch.empty_like(source) for _ in range(count)]
        options = dist.GatherOptions()
        options.rootRank = 0
        self._compute.gather([targets] if targets else [], [source], options).wait()
        return [tensor.to(x.device) for tensor in targets]

    def abort(self) -> None:
        """Abort a wait for a dead rank. Gloo detects that by itself."""
        if self._nccl:
            self._compute.abort()
