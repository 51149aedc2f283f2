"""The processes that hold one model together, each a part of it: its ranks.

Rank 0 is the process that people deal with. It tells the others what to compute, one message a
step; all of them sum what they found while the step runs. Two ways to have others:

    Ranks.spawned(4, device="cuda")     starts three processes on this machine, and ends them
    Ranks.of_torchrun(device="cuda")    those that torchrun has started, on any number of machines

When a rank fails or is gone, rank 0 knows within seconds: what waits for it gets an error in
words, and so does everything that is asked later. When rank 0 is gone, the others end.
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

from unspool.backends.torch.parallel.groups import Groups, Store, dist
from unspool.backends.torch.parallel.messages import Message
from unspool.backends.torch.parallel.processes import Process, end, how, start
from unspool.errors import SettingsError, UnspoolError
from unspool.model.split import Share

_LOOPBACK = "127.0.0.1"
_START = 300.0  # seconds for another process to import torch
_REASON = 2.0  # seconds in which a rank that failed says why
_BEGIN, _HERE, _FAILED = "begin", "here/{}", "failed/{}"  # what the store has

Device = str | list[str]  # the same for all ranks ("cuda": each its own), or one for each


class RankError(UnspoolError):
    """A process that holds a part of the model has failed, or is gone."""


class Ranks:
    """This process among them."""

    def __init__(
        self,
        store: Store,
        share: Share,
        device: Device,
        *,
        address: str | None = None,
        processes: Sequence[Process] = (),
    ) -> None:
        given = [device] if isinstance(device, str) else device
        place = given[share.rank] if len(given) > 1 else given[0]
        if place == "cuda":
            place = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        alone = len(set(given)) == len(given)  # NCCL wants a GPU for each rank
        self.share, self.device = share, torch.device(place)
        self.failure = ""  # in words, once there is one
        self.on_failure: list[Callable[[str], None]] = []
        self._store, self._processes = store, processes
        self._lock, self._failing = threading.RLock(), threading.Lock()
        self._closed = False
        self._models = 0
        nccl = self.device.type == "cuda" and alone
        self.groups = Groups(store, share, self.device, nccl=nccl, address=address)

    # -- how they come together ----------------------------------------------------------------

    @classmethod
    def spawned(cls, count: int, device: Device) -> Ranks:
        """As many processes on this machine, of which this one is the first."""
        if device == "cuda" and torch.cuda.device_count() < count:
            raise SettingsError(
                f"tensor_parallel is {count}, and this machine has {torch.cuda.device_count()} "
                "GPUs; give a smaller number, or start Unspool with torchrun on several machines"
            )
        listening = socket.create_server((_LOOPBACK, 0))  # nobody else can reach it
        port = listening.getsockname()[1]
        store = dist.TCPStore(
            _LOOPBACK, port, is_master=True, wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )  # fmt: skip
        threads = max(1, (os.cpu_count() or 1) // count)
        processes = start(port, count, threads)
        try:
            _wait_for(store, processes)
            store.set(_BEGIN, json.dumps({"device": device}))
            ranks = cls(store, Share(0, count), device, address=_LOOPBACK, processes=processes)
        except BaseException:
            end(processes)
            raise
        if ranks.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads)
        weak = weakref.ref(ranks)
        for process in processes:
            threading.Thread(target=_watch, args=(weak, process), daemon=True).start()
        weakref.finalize(ranks, end, processes)
        return ranks

    @classmethod
    def of_torchrun(cls, device: Device) -> Ranks:
        """The processes that torchrun has started, of which this one is the first."""
        store, share = _rendezvous()
        store.set(_BEGIN, json.dumps({"device": device}))
        return cls(store, share, device)

    @classmethod
    def joined(cls, port: int, share: Share) -> Ranks:
        """One of the others, started by `spawned`."""
        store = dist.TCPStore(_LOOPBACK, port, is_master=False, wait_for_workers=False)
        store.set(_HERE.format(share.rank), "")
        return cls(store, share, json.loads(store.get(_BEGIN))["device"], address=_LOOPBACK)

    @classmethod
    def joined_torchrun(cls) -> Ranks | None:
        """One of the others, started by torchrun; None: the first has nothing to do for it."""
        store, share = _rendezvous()
        while True:
            with suppress(dist.DistStoreError):  # the first takes its time, or fetches the model
                store.wait([_BEGIN], timedelta(seconds=60))
                break
        begin = json.loads(store.get(_BEGIN))
        return cls(store, share, begin["device"]) if begin else None

    # -- what rank 0 tells ---------------------------------------------------------------------

    def new_model(self) -> int:
        """A number for one more model that these ranks hold."""
        self._models += 1
        return self._models

    @contextmanager
    def together(self, message: Message) -> Iterator[None]:
        """Tell the others, and do the same here meanwhile; nobody else tells them anything."""
        with self._lock:
            if self.failure or self._closed:
                raise RankError(self.failure or "the model was closed; load it again")
            try:
                self.groups.tell(message.encode())
                yield
            except UnspoolError as error:
                self._failed(error)  # the others are in the middle of it
                raise
            except BaseException as error:
                raise self._failed(error) from error

    def hear(self) -> Message:
        """What rank 0 tells next."""
        return Message.decode(self.groups.hear())

    # -- how it ends -----------------------------------------------------------------------------

    def report(self, error: BaseException) -> None:
        """Say why this rank fails, to be read by the first."""
        words = str(error)
        if not isinstance(error, UnspoolError):
            words = f"{type(error).__name__}: {words}"
        with suppress(Exception):  # the first may be gone
            self._store.set(_FAILED.format(self.share.rank), words[:2000])

    def _failed(self, error: BaseException | None) -> RankError:
        """These ranks cannot go on; why, in words."""
        with self._failing:
            news = not self.failure
            if news:
                self.failure = f"{self._reason(error)}; the model must be loaded again"
                end(self._processes)
        for tell in self.on_failure if news else ():
            tell(self.failure)
        return RankError(self.failure)

    def _reason(self, error: BaseException | None) -> str:
        if isinstance(error, UnspoolError):
            return str(error)
        until, ranks = time.monotonic() + _REASON, self.share.ranks
        while time.monotonic() < until:
            for rank in range(1, ranks):
                with suppress(Exception):  # where torchrun keeps it, it may be gone
                    if self._store.check([_FAILED.format(rank)]):
                        words = self._store.get(_FAILED.format(rank)).decode()
                        return f"rank {rank} of {ranks} failed: {words}"
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    return f"rank {rank} of {ranks} is gone ({how(process)})"
            time.sleep(0.02)
        first = (str(error).splitlines() or [""])[0]
        return f"rank 0 of {ranks} failed: {type(error).__name__}: {first}"

    def rank_ended(self) -> None:
        """A process is gone that should not be."""
        if not self._closed:
            self._failed(None)
            self.groups.abort()

    def close(self) -> None:
        """End the other ranks. Twice is once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self.failure:
                with suppress(Exception):  # they may be gone already
                    self.groups.tell(Message("end").encode())
        end(self._processes)


def _wait_for(store: Store, processes: Sequence[Process]) -> None:
    """For all of them to be here."""
    until = time.monotonic() + _START
    names = [_HERE.format(rank) for rank in range(1, len(processes) + 1)]
    while not store.check(names):
        for rank, process in enumerate(processes, 1):
            if process.poll() is not None:
                raise RankError(f"rank {rank} could not be started ({how(process)})")
        if time.monotonic() > until:
            raise RankError(f"the other ranks did not start within {_START:.0f} seconds")
        time.sleep(0.02)


def _watch(ranks: weakref.ref[Ranks], process: Process) -> None:
    process.wait()
    owner = ranks()
    if owner is not None:
        owner.rank_ended()


def _rendezvous() -> tuple[Store, Share]:
    store, rank, ranks = next(dist.rendezvous("env://"))
    return dist.PrefixStore("unspool", store), Share(rank, ranks)


def let_go_torchrun() -> None:
    """Rank 0 ends, and never needed the others that torchrun has started."""
    store, _ = _rendezvous()
    if not store.check([_BEGIN]):
        store.set(_BEGIN, "null")
