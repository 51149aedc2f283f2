"""Run a batch job: rows from the input to workers, their outcomes into the journal.

with Journal(output) as journal:
    journal.open(job_facts(survey(path), plan))
    run(path, journal, lambda: LocalPool(plan.worker()), print)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from unspool.scale.batch.journal import Journal
from unspool.scale.batch.output import write_output
from unspool.scale.batch.plan import WorkerPlan
from unspool.scale.batch.rows import BatchRow, InputSummary, read_rows
from unspool.scale.batch.worker import MAX_ROWS, BatchWorker, Outcome, failed_outcome

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
