"""The engine's own thread: plan a step, launch it, settle what came of it, and round again.

While a device computes step n, step n+1 is planned and launched, and only then is n settled, if the
backend can overlap them. Texts that the chain picks for sit out that step: their tokens are picked
while it runs, a few texts at a time, so that they do not hold up the others. What others want of
the tree comes in as commands (`thread.py`).

An exception fails the rows that it concerns, in words, and the loop goes on. One that concerns
nobody in particular fails everyone in flight, and the loop goes on.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from unspool.backends.base import Backend
from unspool.backends.step import Handle
from unspool.engine.batch import BatchBuilder, Share, share_out
from unspool.engine.picking import ChainPicker
from unspool.engine.scheduler import Scheduler, Task
from unspool.engine.sequence import Sequence
from unspool.engine.states import StatePool
from unspool.engine.thread import SupervisedThread
from unspool.engine.tree import Tree
from unspool.errors import BusyError

_PICKED_TOGETHER = 16  # texts, by the chain, before somebody looks whether the device has to wait


@dataclass(slots=True)
class Flight:
    """A step that is launched and not settled yet."""

    shares: list[Share]
    handle: Handle
    layers: tuple[int, ...] | None = None  # whose vectors are seen; None: those of all


class Loop(SupervisedThread):
    """The tree, the scheduler and the thread that owns them."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        states = StatePool.of(
            backend.state_count, backend.state_bytes, backend.page_bytes, backend.page_size
        )
        self.tree = Tree(backend.page_count, backend.page_size, states)
        # Only torch has modules that hooks can be set on.
        self.tree.is_hooked = getattr(backend, "is_hooked", self.tree.is_hooked)
        self.scheduler = Scheduler(self.tree, backend.limits, echoes=backend.echoes)
        self.steps = 0  # settled so far
        self._batches = BatchBuilder(self.tree)
        self._picker = ChainPicker()
        self._flight: Flight | None = None
        self._unpicked: list[Sequence] = []  # those with logits to pick from

    def has_work(self) -> bool:
        return len(self.scheduler) > 0 or self._flight is not None

    def pause(self) -> None:
        if self._flight is not None:  # nobody changes what is being computed
            self._settle()

    def work(self) -> None:
        """One round: plan, launch, settle."""
        waited_for = len(self.scheduler) > 0
        if not (waited_for or self._flight):
            return
        rows = self.scheduler.plan() if waited_for else []
        if not (rows or self._flight or self._unpicked):
            self._nothing_fits()
            return
        launched = self._launch(rows) if rows else None
        if self._flight is not None:
            self._settle()
        self._flight = launched
        if not self.backend.overlaps and launched is not None:
            self._settle()
        self._pick()

    def _launch(self, rows: list[Task]) -> Flight | None:
        try:
            batch, shares = self._batches.build(rows)
            layers = batch.look.layers if batch.look else None
            hooked = self.tree.is_hooked()
            flight = Flight(shares, self.backend.launch(batch), layers)
            if hooked or self.tree.is_hooked():  # or set by another thread meanwhile
                for share in shares:
                    self.tree.make_private(share.task.branch)
            return flight
        except BaseException as error:  # those in this step fail, and nobody else
            self._lose(rows, error)
            return None

    def _settle(self) -> None:
        """Give every row of the step that was launched what came of it."""
        flight, self._flight = self._flight, None
        assert flight is not None
        try:
            result = flight.handle.result()
            complete = share_out(self.tree, flight.shares, result, flight.layers)
        except BaseException as error:
            self._lose([share.task for share in flight.shares], error)
            return
        self.steps += 1
        for task, failure in complete:
            try:
                if failure is not None:
                    raise failure
                if isinstance(task, Sequence) and task.by_hand:
                    task.flights += 1  # it sits out until it is picked for
                    self._unpicked.append(task)
                else:
                    task.complete()
            except BaseException as error:
                self.fail(task, error)

    def _pick(self) -> None:
        """Let the chain pick for texts that the backend did not pick for: all of them, or, while a
        device computes, as many as there is time for."""
        together = _PICKED_TOGETHER if self.backend.overlaps else len(self._unpicked)
        while self._unpicked:
            some, self._unpicked = self._unpicked[:together], self._unpicked[together:]
            for sequence in some:
                sequence.flights -= 1
            ready = [sequence for sequence in some if sequence.queued]
            for sequence, error in self._picker.pick(ready):
                self.fail(sequence, error)
            for sequence in ready:
                try:
                    sequence.go_on()
                except BaseException as error:
                    self.fail(sequence, error)
            if self._flight is None or self._flight.handle.ready():
                return

    def _nothing_fits(self) -> None:
        """Nothing can run and nobody can be preempted: others hold the memory."""
        first = min(self.scheduler.tasks(), key=lambda task: task.order)
        pool = self.tree.pool
        self.fail(
            first,
            BusyError(
                f"the memory for keys and values is full: {pool.used} of {pool.count} pages are "
                "held by branches that are still open; release some, or allow more memory"
            ),
        )

    def _lose(self, tasks: list[Task], error: BaseException) -> None:
        """A step came to nothing. What it was to change in the block table and in the pages of
        branches that stay open may be undone: they are computed anew."""
        for task in tasks:
            if task.queued:
                self.fail(task, error)
                if not task.branch.closed:
                    self.tree.preempt(task.branch)

    def fail(self, task: Task, error: BaseException) -> None:
        """This task ends with an error, and nobody else's."""
        if task.queued:
            self.scheduler.remove(task)
            task.fail(error)

    def fail_everyone(self, error: BaseException) -> None:
        self._flight = None
        self._unpicked.clear()
        for task in self.scheduler.tasks():
            with contextlib.suppress(BaseException):
                self.fail(task, error)
