"""Run a batch job: rows from the input to workers, their outcomes into the journal.

with Journal(output) as journal:
    journal.open(job_facts(survey(path), plan))
    run(path, journal, lambda: LocalPool(plan.worker()), print)
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from unspool.errors import UnspoolError
from unspool.scale import require_ray
from unspool.scale.batch.journal import Journal, write_output
from unspool.scale.batch.rows import BatchRow, InputSummary, read_rows
from unspool.scale.batch.worker import MAX_ROWS, BatchWorker, Outcome, WorkerPlan, failed_outcome

_MIN_BLOCK = 8  # rows of the smallest block
TakeRows = Callable[[int], list[BatchRow]]  # returns up to n rows; none if there are no more


class WorkerPool(Protocol):
    """Workers that process rows."""

    @property
    def workers(self) -> int:
        """Number of workers."""

    @property
    def num_running(self) -> int:
        """Number of rows that workers process now."""

    def poll(self, take_rows: TakeRows, check_model: Callable[[str], None]) -> list[Outcome]:
        """Give rows to workers with capacity, and wait briefly for finished rows."""

    def close(self) -> None: ...


class LocalPool:
    """One model in this process, with all cores."""

    workers = 1

    def __init__(self, worker: BatchWorker) -> None:
        self._worker = worker
        self._is_checked = False

    @property
    def num_running(self) -> int:
        return len(self._worker)

    def poll(self, take_rows: TakeRows, check_model: Callable[[str], None]) -> list[Outcome]:
        if not self._is_checked:
            check_model(self._worker.fingerprint())
            self._is_checked = True
        return self._worker.exchange(take_rows(MAX_ROWS - self.num_running))

    def close(self) -> None:
        self._worker.close()


@dataclass(slots=True)
class BatchProgress:
    """Progress of a batch."""

    rows: int  # total
    num_done: int  # including earlier runs
    num_failed: int  # failed, of those
    tokens: int = 0  # generated in this run
    workers: int = 1


def job_identity(facts: InputSummary, plan: WorkerPlan) -> dict[str, Any]:
    """Return the settings that must be the same to resume a batch.

    The number of workers may differ, and the weights are compared when they are loaded.
    """
    neutral = ("threads", "offline", "exact")
    load = {name: value for name, value in plan.options.items() if name not in neutral}
    settings = {**plan.settings.to_dict(), "load": load, "adapter": plan.adapter}
    names = {"input": facts.digest, "model_name": plan.model}
    return {**names, "rows": facts.rows, "settings": settings}


def run_batch(
    path: Path,
    journal: Journal,
    make_pool: Callable[[], WorkerPool],
    on_progress: Callable[[BatchProgress], None],
) -> BatchProgress:
    """Process all rows that are not done yet, and write the output."""
    state = BatchProgress(journal.job["rows"], journal.num_done, journal.num_failed)
    if state.num_done < state.rows:
        pool = make_pool()
        try:
            rows = _PendingRows(path, journal, pool)
            while not rows.ended or pool.num_running:
                outcomes = pool.poll(rows.take_rows, journal.check_model)
                journal.record([*rows.faulty(), *outcomes])
                state.tokens += sum(_tokens(outcome) for outcome in outcomes)
                state.num_done, state.num_failed = journal.num_done, journal.num_failed
                state.workers = pool.workers
                on_progress(state)
        finally:
            pool.close()
    write_output(journal)
    return state


class _PendingRows:
    """The rows that are not done, in blocks that shrink towards the end.

    So all workers finish at about the same time.
    """

    def __init__(self, path: Path, journal: Journal, pool: WorkerPool) -> None:
        self._pool, self._num_left = pool, journal.job["rows"] - journal.num_done
        self._rows = self._pending(path, journal)
        self._faulty: list[Outcome] = []
        self.ended = False

    def _pending(self, path: Path, journal: Journal) -> Iterator[BatchRow]:
        for row in read_rows(path):
            if not journal.is_done(row.number):
                yield row
        self.ended = True

    def take_rows(self, count: int) -> list[BatchRow]:
        if self._pool.workers > 1:
            count = min(count, max(_MIN_BLOCK, self._num_left // (2 * self._pool.workers)))
        rows: list[BatchRow] = []
        while len(rows) + len(self._faulty) < count:
            if (row := next(self._rows, None)) is None:
                break
            self._num_left -= 1
            if row.fault is None:
                rows.append(row)
            else:
                self._faulty.append(failed_outcome(row, row.fault))
        return rows

    def faulty(self) -> list[Outcome]:
        """Return the invalid rows since the last call."""
        faulty, self._faulty = self._faulty, []
        return faulty


def _tokens(outcome: Outcome) -> int:
    answer = outcome.get("answer", {})
    if "response" in answer:
        usage = answer["response"]["body"].get("usage") or {}
        return int(usage.get("completion_tokens", usage.get("output_tokens", 0)))
    return int(answer.get("completion_tokens", 0))


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
