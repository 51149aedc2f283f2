"""The engine loop: plan a step, launch it, settle its result, repeat.

While a device computes step n, step n+1 is planned and launched, and only then step n is settled,
if the backend can overlap them. Sequences that are sampled on the host sit out that step: they are
sampled while it runs, a few at a time, so that they do not delay the others. Other threads use the
tree through commands.

An exception fails the rows it concerns; one that concerns no row in particular fails every task in
flight. The loop continues in both cases.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from unspool.backends.step import Backend, Logits, StepHandle
from unspool.engine.batch import BatchBuilder, RowSlice, scatter_continued, scatter_results
from unspool.engine.scheduler import EngineTask, Scheduler
from unspool.engine.sequence import Sequence
from unspool.engine.states import StatePool
from unspool.engine.tree import Tree
from unspool.errors import BusyError, UnspoolError
from unspool.sampling import Chain, Pick, RowInput, SamplingSettings
from unspool.sampling.candidates import ROW_ERRORS

# -- Sampling on the host


class ChainPicker:
    """Samples for many sequences, and caches the chains of groups that recur."""

    def __init__(self) -> None:
        self._chains: dict[tuple[int, ...], Chain] = {}

    def pick(self, ready: list[Sequence]) -> list[tuple[Sequence, BaseException]]:
        """Sample one token for every sequence; with drafts, as many as match.

        Returns:
            The sequences that failed, with the reason.
        """
        failed: list[tuple[Sequence, BaseException]] = []
        pending = [(sequence, sequence.next_logits()) for sequence in ready]
        while pending:
            matched = []
            for sequence, pick in self._picks(pending, failed):
                try:
                    is_match = sequence.accept(pick.token, pick.logprob, pick)
                except BaseException as error:  # from a caller's predicate, for example
                    failed.append((sequence, error))
                    continue
                if is_match:
                    matched.append((sequence, sequence.next_logits()))
            pending = matched
        return failed

    def _picks(
        self, pending: list[tuple[Sequence, Logits]], failed: list[tuple[Sequence, BaseException]]
    ) -> list[tuple[Sequence, Pick]]:
        """Sample one token for each sequence; those that cannot be sampled join `failed`."""
        groups: dict[tuple[int, bool], list[tuple[Sequence, Logits, RowInput]]] = {}
        for sequence, logits in pending:
            limits = sequence.request.limits
            try:
                row = sequence.row_input()
            except Exception as error:  # from a grammar that outgrew its limits, for example
                failed.append((sequence, error))
                continue
            groups.setdefault((limits.top, limits.explain), []).append((sequence, logits, row))
        picked: list[tuple[Sequence, Pick]] = []
        for (top, explain), members in groups.items():
            while members:
                chain = self._chain([sequence.request.settings for sequence, _, _ in members])
                stacked = concat_logits([logits for _, logits, _ in members])
                rows = [row for _, _, row in members]
                try:
                    picks = chain.pick(stacked, rows, top=top, explain=explain)
                except ROW_ERRORS as error:
                    failed += [(members[number][0], error) for number in error.rows]
                    members = [m for n, m in enumerate(members) if n not in error.rows]
                    continue
                except Exception as error:  # it names no row: all of them fail
                    failed += [(sequence, error) for sequence, _, _ in members]
                    break
                picked += [(s, p) for (s, _, _), p in zip(members, picks, strict=True)]
                break
        return picked

    def _chain(self, settings: list[SamplingSettings]) -> Chain:
        key = tuple(map(id, settings))
        if key not in self._chains:
            if len(self._chains) > 64:
                self._chains.clear()
            self._chains[key] = Chain(settings)
        return self._chains[key]


def concat_logits(parts: AbstractSequence[Logits]) -> Logits:
    """Concatenate rows of logits: as a tensor if all parts are tensors, else as a numpy array."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return np.empty((0, 0), np.float32)
    tensors = [part for part in parts if not isinstance(part, np.ndarray)]
    if len(tensors) == len(parts):
        import torch

        return torch.cat(tensors)
    return np.concatenate(
        [part if isinstance(part, np.ndarray) else part.cpu().numpy() for part in parts]
    )


# -- A supervised thread that owns some state and runs commands on it for other threads

Result = TypeVar("Result")
_ALIVE_CHECK_S = 1.0  # how often a waiting caller checks that the thread is alive


class SupervisedThread:
    """A thread that starts with the first command. Subclasses implement its work."""

    def __init__(self) -> None:
        self._commands: deque[tuple[Callable[[], object], bool]] = deque()  # (command, at rest?)
        self._wake = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()  # the process that the thread lives in
        self._calling = False  # whether the thread runs a command of `call`
        self._at_rest = False  # whether nothing was in flight when that command started

    def has_work(self) -> bool:
        raise NotImplementedError

    def work(self) -> None:
        """Run one round."""
        raise NotImplementedError

    def finish_in_flight(self) -> None:
        """Wait for what is in flight. Called before a command that runs at rest."""
        raise NotImplementedError

    def fail_all(self, error: BaseException) -> None:
        """Fail all tasks: the error concerns none of them in particular."""
        raise NotImplementedError

    def call(self, command: Callable[[], Result], *, at_rest: bool = True) -> Result:
        """Run a command on the thread between two rounds, and return its result.

        A command may call others, which run immediately; one that runs at rest settles first what
        is in flight.

        Args:
            command: What to run.
            at_rest: Wait until nothing is in flight. This stalls the pipeline for all tasks, so
                pass False for a command that changes nothing which a step in flight uses.

        Raises:
            UnspoolError: Called on the engine's thread, but not by a command.
        """
        if self._calling and self.is_own_thread():
            if at_rest and not self._at_rest:
                self.finish_in_flight()
            return command()
        self.check_caller()
        future: Future[Result] = Future()

        def run() -> None:
            self._calling, self._at_rest = True, at_rest
            try:
                future.set_result(command())
            except BaseException as error:
                future.set_exception(error)
            finally:
                self._calling = False

        self.post(run, at_rest=at_rest)
        return self.wait_for(future)

    def wait_for(self, future: Future[Result]) -> Result:
        """Return a future's result; raise UnspoolError if the thread is no longer alive."""
        self.check_caller()
        while True:
            try:
                return future.result(_ALIVE_CHECK_S)
            except TimeoutError:
                if future.done():
                    return future.result()
                self.check_alive()

    def post(self, command: Callable[[], object], *, at_rest: bool = True) -> None:
        """Run a command on the thread between two rounds, without waiting for it; see `call`."""
        self._check_process()
        with self._wake:
            if self._closed:
                raise UnspoolError("the engine is closed")
            if self._thread is None:
                self._process = os.getpid()
                thread = threading.Thread(target=self._run, name="unspool-engine", daemon=True)
                thread.start()  # before others see it: a thread that has not started looks dead
                self._thread = thread
                # The process must not end while the thread is in the middle of a step.
                atexit.register(self.close)
            self._commands.append((command, at_rest))
            self._wake.notify()

    def clean_up(self, command: Callable[[], object], *, at_rest: bool = True) -> None:
        """Run a command that releases something, and wait for it.

        On the engine's own thread, where the garbage collector may end a generator, it is queued.
        """
        if self.is_own_thread() and not self._calling:  # never waits
            self.post(command, at_rest=at_rest)
        else:
            self.call(command, at_rest=at_rest)

    def check_caller(self, *, allow_commands: bool = False) -> None:
        """Refuse to wait on the engine's own thread: it would wait for itself.

        Raises:
            UnspoolError: Called on the engine's thread, and not by a command that is allowed to.
        """
        if self.is_own_thread() and not (allow_commands and self._calling):
            raise UnspoolError(
                "this model is computing the step that calls it: a guard, drafter or sampling "
                "stage runs on the engine's thread and cannot wait for the same model; use "
                "another model there, or call this one before or after"
            )

    def check_alive(self) -> None:
        """Raise UnspoolError if the thread has died."""
        self._check_process()
        thread = self._thread
        if thread is not None and not thread.is_alive():
            raise UnspoolError("the engine's thread has ended; load the model again")

    @property
    def alive(self) -> bool:
        """Whether the engine can take requests (its thread starts with the first)."""
        return not self._closed and (self._thread is None or self._thread.is_alive())

    def close(self) -> None:
        """Stop the thread. Running tasks fail with "the engine was closed"."""
        if self._is_forked_copy():
            return
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None and not self.is_own_thread():
            self._thread.join()
            atexit.unregister(self.close)

    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _is_forked_copy(self) -> bool:
        """Return whether this process was forked from the one that has the thread.

        Nothing here may be touched then: the thread may have held any lock, and no thread here
        will release it.
        """
        return self._thread is not None and self._process != os.getpid()

    def _check_process(self) -> None:
        if self._is_forked_copy():
            raise UnspoolError(
                "this model was in use before the process was forked; load it in the child process"
            )

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                try:
                    self._run_commands()
                    if not self._closed:
                        self.work()
                except BaseException as error:  # it concerns no task in particular
                    self.fail_all(error)
        finally:
            with self._wake:
                self._closed = True
            while self._commands:
                self._run_commands()
            self.fail_all(UnspoolError("the engine was closed"))

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._commands or self.has_work() or self._closed):
                self._wake.wait()
            return not self._closed

    def _run_commands(self) -> None:
        """Run the commands that wait now; those that arrive meanwhile do not delay a step."""
        for _ in range(len(self._commands)):
            command, at_rest = self._commands.popleft()
            if at_rest:
                self.finish_in_flight()
            command()


_PICKED_TOGETHER = 16  # sequences sampled on the host before checking whether the device is idle


@dataclass(slots=True)
class StepInFlight:
    """A step that is launched and not settled."""

    rows: list[EngineTask]
    slices: list[RowSlice] | None  # each row's part; None: one sampled token
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
        if self._in_flight is not None and all(t.waits_for_others for t in self.scheduler.running):
            self._settle()  # all texts share the next step
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
            step = StepInFlight(rows, slices, self.backend.launch(batch), layers)
            if was_hooked or self.tree.is_hooked():  # another thread may set hooks meanwhile
                for task in rows:
                    self.tree.make_private(task.branch)
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
            if step.slices is None:
                complete = scatter_continued(self.tree, step.rows, result)
            else:
                complete = scatter_results(self.tree, step.slices, result, step.layers)
        except BaseException as error:
            self._lose(step.rows, error)
            return
        self.steps += 1
        has_logits = len(result.logits) > 0
        for task, failure in complete:
            try:
                if failure is not None:
                    raise failure
                if has_logits and isinstance(task, Sequence) and task.samples_on_host:
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
