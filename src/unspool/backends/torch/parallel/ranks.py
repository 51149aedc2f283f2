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
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch

from unspool.backends.torch.parallel.groups import RankGroups, Store, dist
from unspool.backends.torch.parallel.messages import RankMessage
from unspool.backends.torch.parallel.processes import (
    Process,
    exit_reason,
    start_processes,
    stop_processes,
)
from unspool.errors import SettingsError, UnspoolError
from unspool.model.split import TensorParallelRank

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

    # -- start ---------------------------------------------------------------------------------

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

    # -- messages ------------------------------------------------------------------------------

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

    # -- failure and end -------------------------------------------------------------------------

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
