"""Ranks: the processes that share a model with tensor parallelism.

Rank 0 is the user's process. It sends the others one message per step, and all ranks sum their
partial results during the step. There are two ways to start the others:

    Ranks.spawn(4, device="cuda")           starts three processes on this machine, and stops them
    Ranks.from_torchrun(device="cuda")      uses the processes of torchrun, on one or more machines

When a rank fails or exits, rank 0 detects it within seconds: the waiting call and all later calls
raise a RankError. When rank 0 exits, the others exit.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch import Tensor

from unspool.backends.step import ObserveRequest, StepBatch, TableUpdates
from unspool.errors import SettingsError, UnspoolError
from unspool.model.adapters import Adapter, LowRank
from unspool.model.files.sharding import TensorParallelRank

# -- Messages from rank 0 to the others, as bytes: a line of JSON, then arrays

Arrays = dict[str, npt.NDArray[Any]]

_HEADER_BYTES = 4  # length of the JSON line
# Fields that are arrays.
_STEP_ARRAYS = tuple(f.name for f in fields(StepBatch) if f.type == "Ints")
_UPDATE_ARRAYS = tuple(f.name for f in fields(TableUpdates))
_LOOK_ARRAYS = tuple(f.name for f in fields(ObserveRequest) if f.type == "Ints")


@dataclass(frozen=True, slots=True)
class RankMessage:
    """A command for all ranks: its kind, the number of the model, and its arguments."""

    kind: str
    model: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)

    def encode(self) -> bytes:
        shapes = {name: [a.dtype.str, a.shape] for name, a in self.arrays.items()}
        line = json.dumps([self.kind, self.model, self.facts, shapes]).encode()
        parts = [np.ascontiguousarray(array).tobytes() for array in self.arrays.values()]
        return b"".join([len(line).to_bytes(_HEADER_BYTES, "little"), line, *parts])

    @classmethod
    def decode(cls, content: bytes) -> RankMessage:
        end = _HEADER_BYTES + int.from_bytes(content[:_HEADER_BYTES], "little")
        kind, model, facts, shapes = json.loads(content[_HEADER_BYTES:end])
        arrays: Arrays = {}
        for name, (dtype, shape) in shapes.items():
            count = int(np.prod(shape))
            array = np.frombuffer(content, dtype, count, end).reshape(shape)
            arrays[name] = array.copy()  # torch needs writable memory
            end += array.nbytes
        return cls(kind, model, facts, arrays)


def step_message(model: int, batch: StepBatch) -> RankMessage:
    arrays = {name: getattr(batch, name) for name in _STEP_ARRAYS}
    arrays |= {f"updates.{name}": getattr(batch.table_updates, name) for name in _UPDATE_ARRAYS}
    facts: dict[str, Any] = {}
    if batch.observe:
        arrays |= {f"look.{name}": getattr(batch.observe, name) for name in _LOOK_ARRAYS}
        facts["layers"] = batch.observe.layers
    return RankMessage("step", model, facts, arrays)


def parse_step(message: RankMessage) -> StepBatch:
    def with_prefix(prefix: str) -> Arrays:
        return {
            name.removeprefix(prefix): array
            for name, array in message.arrays.items()
            if name.startswith(prefix)
        }

    arrays: dict[str, Any] = {name: message.arrays[name] for name in _STEP_ARRAYS}
    batch = StepBatch(**arrays)
    batch.table_updates = TableUpdates(**with_prefix("updates."))
    look: dict[str, Any] = with_prefix("look.")
    if look:
        layers = message.facts["layers"]
        batch.observe = ObserveRequest(**look, layers=None if layers is None else tuple(layers))
    return batch


def adapter_message(model: int, number: int, adapter: Adapter | None) -> RankMessage:
    facts: dict[str, Any] = {"number": number, "scales": None}
    if adapter is None:
        return RankMessage("adapter", model, facts)
    facts["scales"] = {name: part.scale for name, part in adapter.parts.items()}
    arrays: Arrays = {}
    for name, part in adapter.parts.items():
        arrays |= {f"{name} down": part.down, f"{name} up": part.up}
    return RankMessage("adapter", model, facts, arrays)


def parse_adapter(message: RankMessage) -> Adapter | None:
    scales = message.facts["scales"]
    if scales is None:
        return None
    return Adapter(
        {
            name: LowRank(message.arrays[f"{name} down"], message.arrays[f"{name} up"], scale)
            for name, scale in scales.items()
        }
    )


# -- Communication between ranks: bytes from rank 0, and tensor collectives

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


# -- Processes of the other ranks on this machine; they end with the process that started them

Process = subprocess.Popen[bytes]

_EXIT_TIMEOUT_S = 5.0  # before a process is killed
_WORKER_MODULE = "unspool.backends.torch.parallel.worker"


def start_processes(port: int, count: int, threads: int) -> list[Process]:
    """Start ranks 1 to count - 1."""
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    return [
        subprocess.Popen(
            [sys.executable, "-P", "-m", _WORKER_MODULE, str(port), str(rank), str(count)],
            stdin=subprocess.PIPE,  # closed by the system when this process ends
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to this process only, which stops them
            env={**environment, "LOCAL_RANK": str(rank)},
        )
        for rank in range(1, count)
    ]


def stop_processes(processes: Sequence[Process]) -> None:
    """Close their stdin, on which they exit; kill those that do not."""
    for process in processes:
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def exit_reason(process: Process) -> str:
    """How an ended process ended."""
    code = process.returncode
    if code >= 0:
        return f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


_LOOPBACK = "127.0.0.1"
_START_TIMEOUT_S = 300.0  # for the other processes to import torch
_REASON_TIMEOUT_S = 2.0  # for a failed rank to report its error
_BEGIN, _HERE, _FAILED = "begin", "here/{}", "failed/{}"  # keys of the store

Device = str | list[str]  # one for all ranks ("cuda": one GPU each), or a list with one per rank


class RankError(UnspoolError):
    """A process with a part of the model failed or exited."""


class Ranks:
    """The ranks as seen from this process. Thread-safe on rank 0."""

    def __init__(
        self,
        store: Store,
        share: TensorParallelRank,
        device: Device,
        *,
        address: str | None = None,
        processes: Sequence[Process] = (),
    ) -> None:
        devices = [device] if isinstance(device, str) else device
        name = devices[share.rank] if len(devices) > 1 else devices[0]
        if name == "cuda":
            name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        distinct = len(set(devices)) == len(devices)  # NCCL needs a GPU per rank
        self.share, self.device = share, torch.device(name)
        self.failure = ""  # message, once a rank failed
        self.on_failure: list[Callable[[str], None]] = []
        self._store, self._processes = store, processes
        self._lock, self._failing = threading.RLock(), threading.Lock()
        self._closed = False
        self._models = 0
        nccl = self.device.type == "cuda" and distinct
        self.groups = RankGroups(store, share, self.device, nccl=nccl, address=address)

    @classmethod
    def spawn(cls, count: int, device: Device) -> Ranks:
        """Start count - 1 processes on this machine; this one becomes rank 0."""
        if device == "cuda" and torch.cuda.device_count() < count:
            raise SettingsError(
                f"tensor_parallel must be <= {torch.cuda.device_count()}, the local GPUs, "
                f"got {count}; give less, or start Unspool with torchrun on several machines"
            )
        listening = socket.create_server((_LOOPBACK, 0))  # not reachable from other machines
        port = listening.getsockname()[1]
        store = dist.TCPStore(
            _LOOPBACK, port, is_master=True, wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )  # fmt: skip
        threads = max(1, (os.cpu_count() or 1) // count)
        processes = start_processes(port, count, threads)
        try:
            _wait_for_start(store, processes)
            store.set(_BEGIN, json.dumps({"device": device}))
            ranks = cls(
                store, TensorParallelRank(0, count), device, address=_LOOPBACK, processes=processes
            )
        except BaseException:
            stop_processes(processes)
            raise
        if ranks.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads)
        weak = weakref.ref(ranks)
        for process in processes:
            threading.Thread(target=_watch_process, args=(weak, process), daemon=True).start()
        weakref.finalize(ranks, stop_processes, processes)
        return ranks

    @classmethod
    def from_torchrun(cls, device: Device) -> Ranks:
        """Rank 0 of the processes that torchrun started."""
        store, share = _rendezvous()
        store.set(_BEGIN, json.dumps({"device": device}))
        return cls(store, share, device)

    @classmethod
    def join(cls, port: int, share: TensorParallelRank) -> Ranks:
        """Another rank, started by `spawn`."""
        store = dist.TCPStore(_LOOPBACK, port, is_master=False, wait_for_workers=False)
        store.set(_HERE.format(share.rank), "")
        return cls(store, share, json.loads(store.get(_BEGIN))["device"], address=_LOOPBACK)

    @classmethod
    def join_torchrun(cls) -> Ranks | None:
        """Another rank, started by torchrun; None: rank 0 does not need it."""
        store, share = _rendezvous()
        while True:
            with suppress(dist.DistStoreError):  # rank 0 may still download the model
                store.wait([_BEGIN], timedelta(seconds=60))
                break
        begin = json.loads(store.get(_BEGIN))
        return cls(store, share, begin["device"]) if begin else None

    def new_model(self) -> int:
        """Number for another model on these ranks."""
        self._models += 1
        return self._models

    @contextmanager
    def run_on_all(self, message: RankMessage) -> Iterator[None]:
        """Send a message to the other ranks while the body does the same here; one at a time."""
        with self._lock:
            if self.failure or self._closed:
                raise RankError(self.failure or "the model was closed; load it again")
            try:
                self.groups.send(message.encode())
                yield
            except UnspoolError as error:
                self._fail(error)  # the others are still computing
                raise
            except BaseException as error:
                raise self._fail(error) from error

    def receive(self) -> RankMessage:
        """Wait for the next message of rank 0."""
        return RankMessage.decode(self.groups.receive())

    def report(self, error: BaseException) -> None:
        """Store this rank's error for rank 0."""
        text = str(error)
        if not isinstance(error, UnspoolError):
            text = f"{type(error).__name__}: {text}"
        with suppress(Exception):  # rank 0 may have exited
            self._store.set(_FAILED.format(self.share.rank), text[:2000])

    def _fail(self, error: BaseException | None) -> RankError:
        """Stop all ranks after a failure; returns the error to raise."""
        with self._failing:
            is_first = not self.failure
            if is_first:
                self.failure = f"{self._reason(error)}; the model must be loaded again"
                stop_processes(self._processes)
        for callback in self.on_failure if is_first else ():
            callback(self.failure)
        return RankError(self.failure)

    def _reason(self, error: BaseException | None) -> str:
        if isinstance(error, UnspoolError):
            return str(error)
        deadline, ranks = time.monotonic() + _REASON_TIMEOUT_S, self.share.ranks
        while time.monotonic() < deadline:
            for rank in range(1, ranks):
                with suppress(Exception):  # a store of torchrun may be gone
                    if self._store.check([_FAILED.format(rank)]):
                        text = self._store.get(_FAILED.format(rank)).decode()
                        return f"rank {rank} of {ranks} failed: {text}"
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    return f"rank {rank} of {ranks} exited ({exit_reason(process)})"
            time.sleep(0.02)
        first = (str(error).splitlines() or [""])[0]
        return f"rank 0 of {ranks} failed: {type(error).__name__}: {first}"

    def rank_ended(self) -> None:
        """Handle the unexpected exit of a rank."""
        if not self._closed:
            self._fail(None)
            self.groups.abort()

    def close(self) -> None:
        """Stop the other ranks. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self.failure:
                with suppress(Exception):  # they may have exited already
                    self.groups.send(RankMessage("end").encode())
        stop_processes(self._processes)


def _wait_for_start(store: Store, processes: Sequence[Process]) -> None:
    """Wait until all ranks have joined."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    names = [_HERE.format(rank) for rank in range(1, len(processes) + 1)]
    while not store.check(names):
        for rank, process in enumerate(processes, 1):
            if process.poll() is not None:
                raise RankError(f"rank {rank} could not be started ({exit_reason(process)})")
        if time.monotonic() > deadline:
            raise RankError(f"the other ranks did not start within {_START_TIMEOUT_S:.0f} seconds")
        time.sleep(0.02)


def _watch_process(ranks: weakref.ref[Ranks], process: Process) -> None:
    process.wait()
    owner = ranks()
    if owner is not None:
        owner.rank_ended()


def _rendezvous() -> tuple[Store, TensorParallelRank]:
    store, rank, ranks = next(dist.rendezvous("env://"))
    return dist.PrefixStore("unspool", store), TensorParallelRank(rank, ranks)


def release_torchrun() -> None:
    """Let the other processes of torchrun exit if rank 0 never used them."""
    store, _ = _rendezvous()
    if not store.check([_BEGIN]):
        store.set(_BEGIN, "null")
