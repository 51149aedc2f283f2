"""Workers on a Ray cluster: actors that hold a model each.

Plain actors, and not Ray Data: that hands a block of rows to a worker and waits for the whole of
it, so a worker idles while its slowest text is finished, and where a job was killed it begins
again. An actor that is asked again and again what it has finished (`Worker.exchange`, as on this
machine) is never idle, and one process, this one, decides which rows are done.

A worker that dies is replaced, and the rows that it held are handed out again. Should one of them
be what kills workers, it is found: what was held by a worker that died goes out in ever smaller
groups, with nothing else beside it, and a row that was alone with the last one is set aside.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unspool.errors import UnspoolError
from unspool.scale.batch.job import Give
from unspool.scale.batch.plan import WorkerPlan
from unspool.scale.batch.rows import Row
from unspool.scale.batch.worker import AT_ONCE, Outcome, Worker, failed
from unspool.scale.needs_ray import require_ray

_LOOK_UP = 0.1  # seconds that a worker gathers answers before it hands them over
_GROUPS = (AT_ONCE, AT_ONCE // 8, AT_ONCE // 64, 1)  # rows together, by workers they have cost
_MOST_DEATHS = 4  # of workers in a row, without a single answer in between


class WorkerActor:
    """A worker in a process of its own, somewhere in the cluster."""

    def __init__(self, plan: WorkerPlan, cpus: int) -> None:
        self.plan, self.cpus = plan, cpus
        self.worker: Worker | None = None

    def load(self) -> dict[str, str]:
        """The model's fingerprint, or the fault that kept it from being loaded."""
        try:
            self.worker = self.plan.worker(self.cpus)
        except UnspoolError as error:
            return {"fault": str(error)}
        return {"fingerprint": self.worker.fingerprint()}

    def exchange(self, rows: list[Row]) -> list[Outcome]:
        assert self.worker is not None
        if not rows and not len(self.worker):
            time.sleep(_LOOK_UP)  # others still have something to do, and may leave it to this one
        return self.worker.exchange(rows, _LOOK_UP)


@dataclass(eq=False)
class _Hired:
    """An actor, and what it has been given."""

    actor: Any
    is_ready: bool = False
    held: dict[int, Row] = field(default_factory=dict)
    losses: int = 0  # workers that its rows have cost already


class RayPool:
    """As many workers as the cluster has room for."""

    def __init__(
        self,
        plan: WorkerPlan,
        *,
        address: str | None = None,
        workers: int | None = None,
        cpus: int | None = None,
    ) -> None:
        require_ray("a batch on a cluster")
        import ray

        self._ray, self._plan = ray, plan
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            _connect(self._ray, address)
        self.workers, self._cpus, self._gpus = _shape(self._ray, workers, cpus)
        self._asked: dict[Any, _Hired] = {}  # by what their answers will come as
        self._again: dict[int, tuple[Row, int]] = {}  # rows whose workers died, and how many did
        self._deaths = 0
        for _ in range(self.workers):
            self._hire()

    @property
    def held(self) -> int:
        return len(self._again) + sum(len(hired.held) for hired in self._asked.values())

    def turn(self, give: Give, check_model: Callable[[str], None]) -> list[Outcome]:
        """Wait for one of the workers, take what all have that are there, and give them more."""
        ready, _ = self._ray.wait(list(self._asked), num_returns=1, timeout=1.0)
        if ready:
            ready, _ = self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        outcomes: list[Outcome] = []
        for ref in ready:
            hired = self._asked.pop(ref)
            try:
                found = self._ray.get(ref)
            except self._ray.exceptions.RayError as error:  # it died, or cannot go on
                self._ray.kill(hired.actor)
                outcomes += self._lost(hired, error)
                continue
            if hired.is_ready:
                outcomes += found
                for outcome in found:
                    hired.held.pop(outcome["row"])
                    self._deaths = 0
            else:
                if "fault" in found:
                    raise UnspoolError(f"a worker cannot load the model: {found['fault']}")
                check_model(found["fingerprint"])
                hired.is_ready = True
            self._asked[hired.actor.exchange.remote(self._rows_for(hired, give))] = hired
        return outcomes

    def _rows_for(self, hired: _Hired, give: Give) -> list[Row]:
        if hired.held and hired.losses:
            return []  # nothing joins rows that may be dangerous
        if not hired.held and self._again:
            hired.losses = max(losses for _, losses in self._again.values())
            same = [row for row, losses in self._again.values() if losses == hired.losses]
            rows = same[: _GROUPS[hired.losses]]
            for row in rows:
                del self._again[row.number]
        else:
            hired.losses = 0
            rows = give(AT_ONCE - len(hired.held))
        hired.held |= {row.number: row for row in rows}
        return rows

    def _lost(self, hired: _Hired, error: Exception) -> list[Outcome]:
        """A worker died: its rows go to others, and another takes its place."""
        self._deaths += 1
        if self._deaths > _MOST_DEATHS * self.workers:
            told = " ".join(str(error).split())[-300:]
            raise UnspoolError(
                f"{self._deaths} workers died one after the other without an answer, perhaps for "
                f"want of memory; the same command goes on (Ray says: {told})"
            )
        self._hire()
        losses = hired.losses + 1
        if losses < len(_GROUPS):
            self._again |= {number: (row, losses) for number, row in hired.held.items()}
            return []
        reason = f"the worker died while it was written, {losses} times"
        return [failed(row, reason) for row in hired.held.values()]

    def _hire(self) -> None:
        make = self._ray.remote(WorkerActor).options(
            num_cpus=self._cpus, num_gpus=self._gpus, scheduling_strategy="SPREAD"
        )
        hired = _Hired(make.remote(self._plan, max(1, self._cpus)))
        self._asked[hired.actor.load.remote()] = hired

    def close(self) -> None:
        """Let the workers go, and the cluster if it was begun for them."""
        for hired in self._asked.values():
            self._ray.kill(hired.actor)
        self._asked.clear()
        if self._is_ours:
            self._ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    """Join a cluster; without an address the one that this machine is part of, or a new one."""
    options = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, **options)
    except Exception as error:  # Ray raises whatever it likes where it cannot begin
        told = " ".join(str(error).split())[:200]
        if address in (None, "local"):
            raise UnspoolError(f"Ray cannot be started here: {told}") from None
        raise UnspoolError(
            f"there is no Ray cluster at {address} ({told}); begin one with ray start --head, "
            "or leave --address out"
        ) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray has put its own there


def _shape(ray: Any, workers: int | None, cpus: int | None) -> tuple[int, int, int]:
    """How many workers, and how many cores and GPUs each has: one a GPU where there are any,
    otherwise one a machine, with all its cores."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    every = sum(int(node.get("CPU", 0)) for node in nodes)
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    if gpus:
        return workers or gpus, cpus or 1, 1
    if cpus is not None:
        return workers or max(1, every // cpus), cpus, 0
    if workers is not None:
        return workers, max(1, every // workers), 0
    with_cores = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1] or [1]
    return len(with_cores), min(with_cores), 0
