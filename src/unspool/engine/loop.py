"""The engine loop: plan a step, launch it, settle its result, repeat.

While a device computes step n, step n+1 is planned and launched, and only then step n is settled,
if the backend can overlap them. Sequences that are sampled on the host sit out that step: they are
sampled while it runs, a few at a time, so that they do not delay the others. Other threads use the
tree through commands (`thread.py`).

An exception fails the rows it concerns; one that concerns no row in particular fails every task in
flight. The loop continues in both cases.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from unspool.backends.base import Backend
from unspool.backends.step import StepHandle
from unspool.engine.batch import BatchBuilder, RowSlice, scatter_results
from unspool.engine.picking import ChainPicker
from unspool.engine.scheduler import EngineTask, Scheduler
from unspool.engine.sequence import Sequence
from unspool.engine.states import StatePool
from unspool.engine.thread import SupervisedThread
from unspool.engine.tree import Tree
from unspool.errors import BusyError

_PICKED_TOGETHER = 16  # sequences sampled on the host before checking whether the device is idle


@dataclass(slots=True)
class StepInFlight:
    """A step that is launched and not settled."""

    slices: list[RowSlice]
    handle: StepHandle
    layers: tuple[int, ...] | None = None  # whose hidden states are returned; None: all


class Loop(SupervisedThread):
    """The tree, the scheduler and the thread that owns them."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        states = StatePool.for_backend(
            backend.state_count, backend.state_bytes, backend.page_bytes, backend.page_size
        )
        self.tree = Tree(backend.page_count, backend.page_size, states)
        # Only torch has modules that hooks can be set on.
        self.tree.is_hooked = getattr(backend, "is_hooked", self.tree.is_hooked)
        self.scheduler = Scheduler(self.tree, backend.limits, echoes=backend.echoes)
        self.steps = 0  # settled so far
        self._batches = BatchBuilder(self.tree)
        self._picker = ChainPicker()
        self._in_flight: StepInFlight | None = None
        self._unpicked: list[Sequence] = []  # have logits, to be sampled on the host

    def has_work(self) -> bool:
        return len(self.scheduler) > 0 or self._in_flight is not None

    def finish_in_flight(self) -> None:
        if self._in_flight is not None:
            self._settle()

    def work(self) -> None:
        """Run one round: plan, launch, settle."""
        has_tasks = len(self.scheduler) > 0
        if not (has_tasks or self._in_flight):
            return
        rows = self.scheduler.plan() if has_tasks else []
        if not (rows or self._in_flight or self._unpicked):
            self._fail_oldest()
            return
        launched = self._launch(rows) if rows else None
        if self._in_flight is not None:
            self._settle()
        self._in_flight = launched
        if not self.backend.overlaps and launched is not None:
            self._settle()
        self._pick()

    def _launch(self, rows: list[EngineTask]) -> StepInFlight | None:
        try:
            batch, slices = self._batches.build(rows)
            layers = batch.observe.layers if batch.observe else None
            was_hooked = self.tree.is_hooked()
            step = StepInFlight(slices, self.backend.launch(batch), layers)
            if was_hooked or self.tree.is_hooked():  # another thread may set hooks meanwhile
                for row in slices:
                    self.tree.make_private(row.task.branch)
            return step
        except BaseException as error:  # only the rows of this step fail
            self._lose(rows, error)
            return None

    def _settle(self) -> None:
        """Wait for the step in flight and give every row its result."""
        step, self._in_flight = self._in_flight, None
        assert step is not None
        try:
            result = step.handle.result()
            complete = scatter_results(self.tree, step.slices, result, step.layers)
        except BaseException as error:
            self._lose([row.task for row in step.slices], error)
            return
        self.steps += 1
        for task, failure in complete:
            try:
                if failure is not None:
                    raise failure
                if isinstance(task, Sequence) and task.samples_on_host:
                    task.steps_in_flight += 1  # keeps it out of the next steps until it is sampled
                    self._unpicked.append(task)
                else:
                    task.complete()
            except BaseException as error:
                self.fail(task, error)

    def _pick(self) -> None:
        """Sample on the host: all sequences that need it, or, while a device computes, as many as
        there is time for."""
        batch_size = _PICKED_TOGETHER if self.backend.overlaps else len(self._unpicked)
        while self._unpicked:
            batch, self._unpicked = self._unpicked[:batch_size], self._unpicked[batch_size:]
            for sequence in batch:
                sequence.steps_in_flight -= 1
            ready = [sequence for sequence in batch if sequence.queued]
            for sequence, error in self._picker.pick(ready):
                self.fail(sequence, error)
            for sequence in ready:
                try:
                    sequence.schedule_next()
                except BaseException as error:
                    self.fail(sequence, error)
            if self._in_flight is None or self._in_flight.handle.ready():
                return

    def _fail_oldest(self) -> None:
        """Fail the oldest task: no row fits and no sequence can be preempted."""
        oldest = min(self.scheduler.tasks(), key=lambda task: task.order)
        pool = self.tree.pool
        self.fail(
            oldest,
            BusyError(
                f"the KV cache is full: {pool.used} of {pool.count} pages are held by open "
                "branches; release some, or allow more memory"
            ),
        )

    def _lose(self, tasks: list[EngineTask], error: BaseException) -> None:
        """Fail the tasks of a step that failed, and compute their branches anew.

        The step's block-table updates and page copies may be missing. A task may have been
        cancelled while its step was in flight: then the error fails the next task on its branch.
        """
        for task in tasks:
            current = self.scheduler.task_of(task.branch)
            if current is not None:
                self.fail(current, error)
            if not task.branch.closed:
                self.tree.preempt(task.branch)

    def fail(self, task: EngineTask, error: BaseException) -> None:
        """End one task with an error."""
        if task.queued:
            self.scheduler.remove(task)
            task.fail(error)

    def fail_all(self, error: BaseException) -> None:
        self._in_flight = None
        self._unpicked.clear()
        for task in self.scheduler.tasks():
            with contextlib.suppress(BaseException):
                self.fail(task, error)
