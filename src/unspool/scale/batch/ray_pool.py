"""Workers on a Ray cluster: actors with a model each.

Plain actors instead of Ray Data: Ray Data gives a block of rows to a worker and waits for all of
them, so a worker idles until its slowest text is finished, and a killed job starts over. An actor
that is polled for finished rows (`Worker.exchange`, as on this machine) is never idle, and this
process alone decides which rows are done.

A worker that dies is replaced, and its rows are assigned again. If one of them kills workers, it is
isolated: rows of a dead worker are assigned in smaller and smaller groups, with no other rows, and
a row that was alone with its last worker fails.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unspool.errors import UnspoolError
from unspool.scale.batch.job import TakeRows
from unspool.scale.batch.plan import WorkerPlan
from unspool.scale.batch.rows import BatchRow
from unspool.scale.batch.worker import MAX_ROWS, BatchWorker, Outcome, failed_outcome
from unspool.scale.needs_ray import require_ray

_POLL_S = 0.1  # in which a worker gathers answers before it returns them
_GROUPS = (MAX_ROWS, MAX_ROWS // 8, MAX_ROWS // 64, 1)  # rows together, by number of dead workers
_MAX_DEATHS = 4  # consecutive deaths per worker, without any answer in between


class WorkerActor:
    """A worker in a separate process of the cluster."""

    def __init__(self, plan: WorkerPlan, cpus: int) -> None:
        self.plan, self.cpus = plan, cpus
        self.worker: BatchWorker | None = None

    def load(self) -> dict[str, str]:
        """Load the model; return its fingerprint, or the error."""
        try:
            self.worker = self.plan.worker(self.cpus)
        except UnspoolError as error:
            return {"fault": str(error)}
        return {"fingerprint": self.worker.fingerprint()}

    def exchange(self, rows: list[BatchRow]) -> list[Outcome]:
        assert self.worker is not None
        if not rows and not len(self.worker):
            time.sleep(_POLL_S)  # rows of other workers may still be reassigned to this one
        return self.worker.exchange(rows, _POLL_S)


@dataclass(eq=False)
class _Member:
    """An actor of the pool, and its rows."""

    actor: Any
    is_ready: bool = False
    rows: dict[int, BatchRow] = field(default_factory=dict)
    losses: int = 0  # number of workers that died with its rows


class RayPool:
    """As many workers as the cluster has resources for."""

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
        self._owns_ray = not self._ray.is_initialized()
        if self._owns_ray:
            _connect(self._ray, address)
        self.workers, self._cpus, self._gpus = _cluster_layout(self._ray, workers, cpus)
        self._members: dict[Any, _Member] = {}  # by the ObjectRef of their pending call
        self._retries: dict[
            int, tuple[BatchRow, int]
        ] = {}  # rows of dead workers, with their losses
        self._deaths = 0
        for _ in range(self.workers):
            self._add_worker()

    @property
    def num_running(self) -> int:
        return len(self._retries) + sum(len(member.rows) for member in self._members.values())

    def poll(self, take_rows: TakeRows, check_model: Callable[[str], None]) -> list[Outcome]:
        """Wait for any worker, collect the outcomes of all that are ready, and give them rows."""
        refs = list(self._members)
        ready, _ = self._ray.wait(refs, num_returns=1, timeout=1.0)
        if ready:
            ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        outcomes: list[Outcome] = []
        for ref in ready:
            member = self._members.pop(ref)
            try:
                result = self._ray.get(ref)
            except self._ray.exceptions.RayError as error:  # it died, or raised an exception
                self._ray.kill(member.actor)
                outcomes += self._replace(member, error)
                continue
            if member.is_ready:
                outcomes += result
                for outcome in result:
                    member.rows.pop(outcome["row"])
                    self._deaths = 0
            else:
                if "fault" in result:
                    raise UnspoolError(f"a worker cannot load the model: {result['fault']}")
                check_model(result["fingerprint"])
                member.is_ready = True
            call = member.actor.exchange.remote(self._rows_for(member, take_rows))
            self._members[call] = member
        return outcomes

    def _rows_for(self, member: _Member, take_rows: TakeRows) -> list[BatchRow]:
        if member.rows and member.losses:
            return []  # do not add rows to those that may kill the worker
        if not member.rows and self._retries:
            member.losses = max(losses for _, losses in self._retries.values())
            retries = [row for row, losses in self._retries.values() if losses == member.losses]
            rows = retries[: _GROUPS[member.losses]]
            for row in rows:
                del self._retries[row.number]
        else:
            member.losses = 0
            rows = take_rows(MAX_ROWS - len(member.rows))
        member.rows |= {row.number: row for row in rows}
        return rows

    def _replace(self, member: _Member, error: Exception) -> list[Outcome]:
        """Replace a dead worker and schedule its rows again; return rows that fail for good."""
        self._deaths += 1
        if self._deaths > _MAX_DEATHS * self.workers:
            reason = " ".join(str(error).split())[-300:]
            raise UnspoolError(
                f"{self._deaths} workers died in a row without an answer, perhaps out of memory; "
                f"rerun the same command to resume (Ray: {reason})"
            )
        self._add_worker()
        losses = member.losses + 1
        if losses < len(_GROUPS):
            self._retries |= {number: (row, losses) for number, row in member.rows.items()}
            return []
        reason = f"the worker died {losses} times while processing this row"
        return [failed_outcome(row, reason) for row in member.rows.values()]

    def _add_worker(self) -> None:
        actor_class = self._ray.remote(WorkerActor).options(
            num_cpus=self._cpus, num_gpus=self._gpus, scheduling_strategy="SPREAD"
        )
        member = _Member(actor_class.remote(self._plan, max(1, self._cpus)))
        self._members[member.actor.load.remote()] = member

    def close(self) -> None:
        """Stop the workers, and Ray if this pool started it."""
        for member in self._members.values():
            self._ray.kill(member.actor)
        self._members.clear()
        if self._owns_ray:
            self._ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    """Join a cluster; without an address the one of this machine, or a new local one."""
    options = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, **options)
    except Exception as error:  # Ray raises many types of exceptions
        reason = " ".join(str(error).split())[:200]
        if address in (None, "local"):
            raise UnspoolError(f"Ray cannot be started here: {reason}") from None
        raise UnspoolError(
            f"no Ray cluster at {address} ({reason}); start one with ray start --head, or leave "
            "out --address"
        ) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray has replaced it


def _cluster_layout(ray: Any, workers: int | None, cpus: int | None) -> tuple[int, int, int]:
    """Return the number of workers, and the cores and GPUs of each.

    One worker per GPU if there are GPUs, else one per machine with all its cores.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    total_cpus = sum(int(node.get("CPU", 0)) for node in nodes)
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    if gpus:
        return workers or gpus, cpus or 1, 1
    if cpus is not None:
        return workers or max(1, total_cpus // cpus), cpus, 0
    if workers is not None:
        return workers, max(1, total_cpus // workers), 0
    with_cores = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1] or [1]
    return len(with_cores), min(with_cores), 0
