"""The engine: one thread that reads batches of many texts, and hands out what comes of it.

    engine = Engine(backend)
    branch = engine.open(prompt_ids)
    logits = branch.append([token])                # append, compute, and get the logits
    other = branch.fork()                          # shares the whole past
    branch.rewind(12)                              # forget every token from the 12th on

Any thread may call it. Each call becomes a command that the engine's thread carries out between
two batches, so nobody ever sees a half-changed tree. Texts that write by themselves (`write.py`)
live on that thread too.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from unspool.backends.base import Backend, Batch, Inside, Ran, Taps
from unspool.engine.scheduler import Row, Scheduler, Task
from unspool.engine.tree import Branch, Tree
from unspool.errors import BusyError, ContextError, UnspoolError

Result = TypeVar("Result")
Finished = Callable[[], None]


class Engine:
    """Runs branches together on one backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.tree = Tree(backend.page_count, backend.page_size, backend.copy_page)
        self.scheduler = Scheduler(self.tree)
        self.runs = 0  # batches so far
        self.after_run: list[Callable[[], None]] = []  # who wants to act once a batch is done
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()  # that the thread lives in

    # -- what callers say, from any thread ---------------------------------------------------

    def open(self, tokens: Sequence[int]) -> Branch:
        """A new branch; what was computed of its tokens before is used again."""
        self._check_length(len(tokens))
        branch = self.call(lambda: self.tree.open(tokens))
        branch.engine = self
        return branch

    def extend(
        self,
        branch: Branch,
        tokens: Sequence[int] = (),
        *,
        wanted: int = 1,
        look: frozenset[int] = frozenset(),
        deep: bool = True,
    ) -> Any:
        """Append tokens, compute all that is not computed yet, and give the last logits."""
        return self.extend_all([(branch, tokens)], wanted=wanted, look=look, deep=deep)[0]

    def extend_all(
        self,
        additions: Sequence[tuple[Branch, Sequence[int]]],
        *,
        wanted: int = 1,
        look: frozenset[int] = frozenset(),
        deep: bool = True,
    ) -> list[Any]:
        """`extend` for several branches, computed in the same batches."""
        futures: list[Future[Any]] = []
        tasks: list[tuple[Branch, Sequence[int], Future[Any]]] = []
        for branch, tokens in additions:
            self._check_length(len(branch.tokens) + len(tokens))
            future: Future[Any] = Future()
            futures.append(future)
            tasks.append((branch, tokens, future))

        def add() -> None:
            for branch, tokens, future in tasks:
                self.tree.append(branch, tokens)
                self._add(branch, wanted, future, look, deep)

        self.call(add)
        return [future.result() for future in futures]

    def fork(self, branch: Branch) -> Branch:
        return self.call(lambda: self.tree.fork(branch))

    def rewind(self, branch: Branch, length: int) -> None:
        self.call(lambda: self.tree.rewind(branch, length))

    def release(self, branch: Branch) -> None:
        """The branch is done with; its pages may serve others."""

        def close() -> None:
            for task in self.scheduler.of(branch):  # somebody was interrupted while waiting
                self._fail(task, UnspoolError("the branch was released"))
            self.tree.close(branch)

        self.call(close)

    def call(self, command: Callable[[], Result]) -> Result:
        """Have a command carried out on the engine's thread, and wait for what it gives."""
        if threading.current_thread() is self._thread:
            return command()
        future: Future[Result] = Future()

        def carry_out() -> None:
            try:
                future.set_result(command())
            except BaseException as error:
                future.set_exception(error)

        self.tell(carry_out)
        return future.result()

    def tell(self, command: Callable[[], None]) -> None:
        """Have a command carried out on the engine's thread; do not wait."""
        if self._left_behind():
            raise UnspoolError(
                "this model was in use before the process was forked; load it in the child process"
            )
        with self._wake:
            if self._closed:
                raise UnspoolError("the engine is closed")
            if self._thread is None:
                self._process = os.getpid()
                self._thread = threading.Thread(
                    target=self._work, name="unspool-engine", daemon=True
                )
                self._thread.start()
                # A thread that is in the middle of a batch must not meet the end of the process.
                atexit.register(self.close)
            self._commands.append(command)
            self._wake.notify()

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

    def _check_length(self, length: int) -> None:
        if length == 0:
            raise UnspoolError("a branch needs at least one token")
        if length > self.backend.context:
            raise ContextError(
                f"the text has {length:,} tokens and the model's context holds "
                f"{self.backend.context:,}; shorten it"
            )
        self.scheduler.check_fits(length)

    # -- the engine's own thread -------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._commands and not self.scheduler.tasks and not self._closed:
                    self._wake.wait()
                if self._closed:
                    break
                commands = list(self._commands)
                self._commands.clear()
            for command in commands:
                command()
            if self.scheduler.tasks:
                self._run_batch()
        for command in list(self._commands):
            command()
        closed = UnspoolError("the engine was closed")
        for task in list(self.scheduler.tasks):  # those that the last commands brought too
            self._fail(task, closed)

    def _run_batch(self) -> None:
        rows = self.scheduler.choose()
        if not rows:
            self._nothing_fits()
            return
        try:
            ran = self._run(rows)
        except BaseException as error:  # the backend's fault: those in this batch fail, alone
            for row in rows:
                self._fail(row.task, error)
            return
        self.runs += 1
        for finished in self._share_out(rows, ran):
            finished()
        for act in self.after_run:
            act()

    def _nothing_fits(self) -> None:
        """Nothing can run and nobody can be put aside: others hold the memory."""
        first = min(self.scheduler.tasks, key=lambda task: (-task.priority, task.number))
        pool = self.tree.pool
        self._fail(
            first,
            BusyError(
                f"the memory for keys and values is full: {pool.used} of {pool.count} pages are "
                "held by branches that are still open; release some, or allow more memory"
            ),
        )

    def _run(self, rows: list[Row]) -> Ran:
        branches = [row.task.branch for row in rows]
        counts = np.array([row.count for row in rows])
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        tokens: list[int] = []
        positions = np.empty(starts[-1], np.int64)
        pages = np.full((len(rows), max(len(b.pages) for b in branches)), -1, np.int64)
        wanted: list[int] = []
        looked: list[int] = []
        deep: list[int] = []
        for number, (row, branch) in enumerate(zip(rows, branches, strict=True)):
            first, last = branch.computed, branch.computed + row.count
            tokens += branch.tokens[first:last]
            positions[starts[number] : starts[number + 1]] = np.arange(first, last)
            pages[number, : len(branch.pages)] = branch.pages
            offset = int(starts[number]) - first
            begin = max(first, len(branch.tokens) - row.task.wanted)
            wanted += [position + offset for position in range(begin, last)]
            places = [p + offset for p in sorted(row.task.look) if first <= p < last]
            looked += places
            deep += places if row.task.deep else []
        batch = Batch(np.array(tokens), positions, starts, pages, np.array(wanted, np.int64))
        taps = None
        if looked:
            whole = np.array(deep, np.int64)
            taps = Taps(residuals=np.array(looked, np.int64), attention=whole, parts=whole)
        return self.backend.run(batch, taps)

    def _share_out(self, rows: list[Row], ran: Ran) -> list[Finished]:
        """Give each row its logits; tell those tasks that are computed now."""
        finished: list[Finished] = []
        at = seen = seen_deep = 0
        for row in rows:
            task, branch = row.task, row.task.branch
            first, last = branch.computed, branch.computed + row.count
            count = max(0, last - max(first, len(branch.tokens) - task.wanted))
            if count:
                task.rows.append(ran.logits[at : at + count])
                at += count
            places = [p for p in sorted(task.look) if first <= p < last]
            if places and ran.inside is not None:
                deep = len(places) if task.deep else 0
                task.inside.append(_part(ran.inside, seen, len(places), seen_deep, deep))
                seen += len(places)
                seen_deep += deep
            self.tree.computed(branch, last)
            if task.left == 0:
                self.scheduler.remove(task)
                finished.append(_Done(task))
        return finished

    def _add(
        self,
        branch: Branch,
        wanted: int,
        future: Future[Any],
        look: frozenset[int],
        deep: bool,
    ) -> Task:
        def done(logits: Any, inside: Any) -> None:
            future.set_result((logits, inside) if look else logits)

        task = Task(branch, wanted, done, future.set_exception, look=look, deep=deep)
        self.scheduler.add(task)
        return task

    def _fail(self, task: Task, error: BaseException) -> None:
        if task in self.scheduler.tasks:
            self.scheduler.remove(task)
        task.failed(error)


class _Done:
    """Tell a task's owner, once all rows of the batch are accounted for."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __call__(self) -> None:
        rows, inside = list(self.task.rows), list(self.task.inside)
        logits = rows[0] if len(rows) == 1 else _joined(rows)
        try:
            self.task.done(logits, inside)
        except BaseException as error:
            self.task.failed(error)


def _joined(rows: list[Any]) -> Any:
    if not rows:
        return np.empty((0, 0), np.float32)
    if isinstance(rows[0], np.ndarray):
        return np.concatenate(rows)
    import torch

    return torch.cat(rows)


def _part(inside: Inside, start: int, count: int, deep_start: int, deep_count: int) -> Inside:
    """The share of one row in what the taps saw."""
    part, deep = slice(start, start + count), slice(deep_start, deep_start + deep_count)
    vectors = None if inside.residuals is None else inside.residuals[:, part]
    parts = None if inside.parts is None else inside.parts[:, :, deep]
    return Inside(vectors, inside.attention[deep], parts)
