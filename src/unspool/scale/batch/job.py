"""The way of a batch: rows from the input to workers, what becomes of them into the journal.

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
from unspool.scale.batch.rows import InputFacts, Row, read_rows
from unspool.scale.batch.worker import AT_ONCE, Outcome, Worker, failed

_BLOCK = 8  # rows: the smallest block that is worth handing out
Give = Callable[[int], list[Row]]  # so many more rows at the most; none: there are no more


class Pool(Protocol):
    """Workers that rows are handed to."""

    @property
    def workers(self) -> int:
        """Among how many the rows are divided."""

    @property
    def held(self) -> int:
        """Rows that are with workers."""

    def turn(self, give: Give, check_model: Callable[[str], None]) -> list[Outcome]:
        """Hand out rows where there is room, and wait a moment for what is finished."""

    def close(self) -> None: ...


class LocalPool:
    """One model in this process, with all cores."""

    workers = 1

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._is_checked = False

    @property
    def held(self) -> int:
        return len(self._worker)

    def turn(self, give: Give, check_model: Callable[[str], None]) -> list[Outcome]:
        if not self._is_checked:
            check_model(self._worker.fingerprint())
            self._is_checked = True
        return self._worker.exchange(give(AT_ONCE - self.held))

    def close(self) -> None:
        self._worker.close()


@dataclass(slots=True)
class BatchProgress:
    """How far a batch is."""

    rows: int  # in all
    done: int  # in all
    bad: int  # of those
    tokens: int = 0  # written in this run
    workers: int = 1


def job_facts(facts: InputFacts, plan: WorkerPlan) -> dict[str, Any]:
    """What must be the same for a batch to be gone on with. How many work on it need not be, and
    of the model the weights are compared when they are there."""
    neutral = ("threads", "offline", "exact")
    load = {name: value for name, value in plan.options.items() if name not in neutral}
    settings = {**plan.settings.to_dict(), "load": load, "adapter": plan.adapter}
    names = {"input": facts.digest, "model_name": plan.model}
    return {**names, "rows": facts.rows, "settings": settings}


def run(
    path: Path, journal: Journal, hire: Callable[[], Pool], tell: Callable[[BatchProgress], None]
) -> BatchProgress:
    """Have every row answered that is not yet, and make the output of them."""
    state = BatchProgress(journal.job["rows"], journal.done, journal.bad)
    if state.done < state.rows:
        pool = hire()
        try:
            rows = _Rows(path, journal, pool)
            while not rows.ended or pool.held:
                outcomes = pool.turn(rows.give, journal.check_model)
                journal.record([*rows.faulty(), *outcomes])
                state.tokens += sum(_tokens(outcome) for outcome in outcomes)
                state.done, state.bad = journal.done, journal.bad
                state.workers = pool.workers
                tell(state)
        finally:
            pool.close()
    write_output(journal)
    return state


class _Rows:
    """The rows that are still to be answered, in blocks that become smaller towards the end, so
    that all workers end at about the same time."""

    def __init__(self, path: Path, journal: Journal, pool: Pool) -> None:
        self._pool, self._left = pool, journal.job["rows"] - journal.done
        self._rows = self._to_do(path, journal)
        self._faulty: list[Outcome] = []
        self.ended = False

    def _to_do(self, path: Path, journal: Journal) -> Iterator[Row]:
        for row in read_rows(path):
            if not journal.is_done(row.number):
                yield row
        self.ended = True

    def give(self, count: int) -> list[Row]:
        if self._pool.workers > 1:
            count = min(count, max(_BLOCK, self._left // (2 * self._pool.workers)))
        given: list[Row] = []
        while len(given) + len(self._faulty) < count:
            if (row := next(self._rows, None)) is None:
                break
            self._left -= 1
            if row.fault is None:
                given.append(row)
            else:
                self._faulty.append(failed(row, row.fault))
        return given

    def faulty(self) -> list[Outcome]:
        """Those that need nobody's work, since they were asked for the last time."""
        found, self._faulty = self._faulty, []
        return found


def _tokens(outcome: Outcome) -> int:
    answer = outcome.get("answer", {})
    if "response" in answer:
        usage = answer["response"]["body"].get("usage") or {}
        return int(usage.get("completion_tokens", usage.get("output_tokens", 0)))
    return int(answer.get("completion_tokens", 0))
