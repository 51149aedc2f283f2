"""The engine's own thread: plan a step, launch it, settle what came of it, and round again.

While a device computes step n, step n+1 is planned and launched, and only then is n settled, if the
backend can overlap them. What others want of the tree comes in as commands, which are carried out
between two steps, so nobody ever sees it half changed.

An exception fails the rows that it concerns, in words, and the loop goes on. One that concerns
nobody in particular fails everyone in flight, and the loop goes on. If the thread is gone all the
same, callers get an error, never a wait.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from unspool.backends.base import Backend
from unspool.backends.step import Handle
from unspool.engine.batch import Share, build, share_out
from unspool.engine.picking import ChainPicker
from unspool.engine.scheduler import Scheduler, Task
from unspool.engine.sequence import Sequence
from unspool.engine.tree import Tree
from unspool.errors import BusyError, UnspoolError

Result = TypeVar("Result")
_LOOK_UP = 1.0  # seconds after which who waits asks whether the thread is still there


@dataclass(slots=True)
class Flight:
    """A step that is launched and not settled yet."""

    shares: list[Share]
    handle: Handle


class Loop:
    """The tree, the scheduler and the thread that owns them."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.tree = Tree(backend.page_count, backend.page_size)
        self.scheduler = Scheduler(self.tree)
        self.steps = 0  # settled so far
        self._picker = ChainPicker()
        self._flight: Flight | None = None
        self._commands: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()  # that the thread lives in

    # -- from any thread ---------------------------------------------------------------------

    def call(self, command: Callable[[], Result]) -> Result:
        """Have a command carried out between two steps, and wait for what it gives."""
        if threading.current_thread() is self._thread:
            return command()
        future: Future[Result] = Future()

        def carry_out() -> None:
            try:
                future.set_result(command())
            except BaseException as error:
                future.set_exception(error)

        self.tell(carry_out)
        return self.wait_for(future)

    def wait_for(self, future: Future[Result]) -> Result:
        """A future's result; an error if the thread that was to give it is gone."""
        while True:
            try:
                return future.result(_LOOK_UP)
            except TimeoutError:
                if future.done():
                    return future.result()
                self.check_alive()

    def tell(self, command: Callable[[], object]) -> None:
        """Have a command carried out between two steps; do not wait."""
        self._check_process()
        with self._wake:
            if self._closed:
                raise UnspoolError("the engine is closed")
            if self._thread is None:
                self._process = os.getpid()
                self._thread = threading.Thread(
                    target=self._work, name="unspool-engine", daemon=True
                )
                self._thread.start()
                # A thread that is in the middle of a step must not meet the end of the process.
                atexit.register(self.close)
            self._commands.append(command)
            self._wake.notify()

    def check_alive(self) -> None:
        """An error if nothing that was asked for can come any more."""
        self._check_process()
        thread = self._thread
        if thread is not None and not thread.is_alive():
            raise UnspoolError("the engine's thread has ended; load the model again")

    @property
    def alive(self) -> bool:
        """Whether the engine can take requests (its thread starts with the first)."""
        return not self._closed and (self._thread is None or self._thread.is_alive())

    def close(self) -> None:
        """Stop the thread. What runs is told that the engine is closed."""
        if self._left_behind():
            return
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()
            atexit.unregister(self.close)

    def _left_behind(self) -> bool:
        """Whether the thread is in another process, which has forked this one. Nothing here may be
        touched then: that thread may have held any lock, and will never give it back."""
        return self._thread is not None and self._process != os.getpid()

    def _check_process(self) -> None:
        if self._left_behind():
            raise UnspoolError(
                "this model was in use before the process was forked; load it in the child process"
            )

    # -- the thread --------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._wait_for_work():
                try:
                    self._carry_out_commands()
                    if not self._closed:
                        self._step()
                except BaseException as error:  # it concerns nobody in particular
                    self._fail_everyone(error)
        finally:
            with self._wake:
                self._closed = True
            self._carry_out_commands()
            self._fail_everyone(UnspoolError("the engine was closed"))

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._commands or len(self.scheduler) or self._flight or self._closed):
                self._wake.wait()
            return not self._closed

    def _carry_out_commands(self) -> None:
        if self._commands and self._flight is not None:  # nobody changes what is being computed
            self._settle_flight()
        while self._commands:
            self._commands.popleft()()

    def _step(self) -> None:
        """One round: plan, launch, settle."""
        if not len(self.scheduler) and self._flight is None:
            return
        rows = self.scheduler.plan() if len(self.scheduler) else []
        if not rows and self._flight is None:
            self._nothing_fits()
            return
        launched = self._launch(rows) if rows else None
        if self._flight is not None:
            self._settle_flight()
        self._flight = launched
        if not self.backend.overlaps and launched is not None:
            self._settle_flight()

    def _launch(self, rows: list[Task]) -> Flight | None:
        try:
            batch, shares = build(self.tree, rows)
            return Flight(shares, self.backend.launch(batch))
        except BaseException as error:  # those in this step fail, and nobody else
            for task in rows:
                self.fail(task, error)
            return None

    def _settle_flight(self) -> None:
        """Give every row of the step that was launched what came of it."""
        flight, self._flight = self._flight, None
        assert flight is not None
        try:
            complete = share_out(self.tree, flight.shares, flight.handle.result())
        except BaseException as error:
            for share in flight.shares:
                self.fail(share.task, error)
            return
        self.steps += 1
        explaining: list[Sequence] = []  # those with logits to pick from
        for task, failure in complete:
            try:
                if failure is not None:
                    raise failure
                if isinstance(task, Sequence) and task.pick_floats is None:
                    explaining.append(task)
                else:
                    task.complete()
            except BaseException as error:
                self.fail(task, error)
        if explaining:
            self._pick(explaining)

    def _pick(self, ready: list[Sequence]) -> None:
        """Let the chain pick for the texts that the backend did not pick for."""
        for sequence, error in self._picker.pick(ready):
            self.fail(sequence, error)
        for sequence in ready:
            try:
                sequence.go_on()
            except BaseException as error:
                self.fail(sequence, error)

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

    def fail(self, task: Task, error: BaseException) -> None:
        """This task ends with an error, and nobody else's."""
        if task.queued:
            self.scheduler.remove(task)
            task.fail(error)

    def _fail_everyone(self, error: BaseException) -> None:
        self._flight = None
        for task in self.scheduler.tasks():
            with contextlib.suppress(BaseException):
                self.fail(task, error)
