"""The engine: many texts computed together on one backend, each of them a branch of one tree.

    engine = Engine(backend, token_bytes)
    branch = engine.open(prompt_ids)
    logits = branch.append([token])                # append, compute, and get the logits
    other = branch.fork()                          # shares the whole past
    branch.rewind(12)                              # drop every token from the 12th on
    for step in engine.submit(request): ...        # a text that writes by itself

Any thread may call it. Each call becomes a command that the engine's thread (`loop.py`) carries
out between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from unspool.backends.base import Backend
from unspool.backends.step import Inside, Logits
from unspool.engine.adapters import EngineAdapters
from unspool.engine.branch import Branch
from unspool.engine.loop import Loop
from unspool.engine.picking import joined
from unspool.engine.request import ReadingDrafter, Request
from unspool.engine.scheduler import Scheduler, Task
from unspool.engine.sequence import Sequence as WrittenText
from unspool.engine.stream import StepQueue, StepStream
from unspool.engine.tree import Tree
from unspool.engine.work_scope import current_scope
from unspool.errors import (
    BusyError,
    ContextError,
    SettingsError,
    UnspoolError,
    WorkCancelledError,
)
from unspool.text.tokenizer.stream import TextStream

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Computed:
    """Logits of a branch's last tokens, and what was looked at inside."""

    logits: Logits  # [wanted, vocabulary]
    inside: list[Inside] = field(default_factory=list)  # of each chunk that was looked at


class AwaitedTask(Task, Generic[Result]):
    """A task whose caller waits for its result; see `Engine.run_tasks`."""

    __slots__ = ("future",)

    def __init__(self, branch: Branch, wanted: int) -> None:
        super().__init__(branch, wanted)
        self.future: Future[Result] = Future()

    def begin(self, scheduler: Scheduler) -> None:
        """Have it computed; on the engine's thread."""
        scheduler.add(self)

    def fail(self, error: BaseException) -> None:
        self.future.set_exception(error)


class _Computation(AwaitedTask[Computed]):
    """A branch that a caller waits for."""

    __slots__ = ("loop",)

    def __init__(self, loop: Loop, branch: Branch, wanted: int) -> None:
        super().__init__(branch, wanted)
        self.loop = loop

    def complete(self) -> None:
        self.loop.scheduler.remove(self)
        self.future.set_result(Computed(joined(self.logits), self.inside))


class Engine:
    """Runs branches together on one backend."""

    def __init__(
        self,
        backend: Backend,
        token_bytes: Callable[[int], bytes] = lambda token: b"",
        *,
        max_waiting: int = 1024,
        check_head: Callable[[], None] = lambda: None,
    ) -> None:
        """`check_head` raises if the model has no output head, so that its logits mean nothing."""
        self.backend, self.token_bytes = backend, token_bytes
        self.check_head = check_head
        self.max_waiting = max_waiting  # requests without a token yet
        self.loop = Loop(backend)
        self.adapters = EngineAdapters(self.loop)
        self._waiting: set[StepQueue] = set()

    @property
    def tree(self) -> Tree:
        return self.loop.tree

    @property
    def scheduler(self) -> Scheduler:
        return self.loop.scheduler

    @property
    def steps(self) -> int:
        """How many steps were run so far."""
        return self.loop.steps

    # -- branches ----------------------------------------------------------------------------

    def open(self, tokens: Sequence[int], adapter: str | None = None) -> Branch:
        """A new branch; what was computed of its tokens before is used again."""
        self._check_length(len(tokens))
        current_scope().check()
        number = self.adapters.number
        branch = self.call(lambda: self.tree.open(tokens, adapter=number(adapter)))
        branch.owner = self
        return branch

    def extend(self, branch: Branch, tokens: Sequence[int] = (), *, wanted: int = 1) -> Logits:
        """Append tokens, compute all that is not computed yet, and give the last logits."""
        return self.extend_all([(branch, tokens)], wanted=wanted)[0]

    def extend_all(
        self,
        additions: Sequence[tuple[Branch, Sequence[int]]],
        *,
        wanted: int | Sequence[int] = 1,
    ) -> list[Logits]:
        """`extend` for several branches, computed in the same steps; of each, as many logits as
        wanted, or as `wanted` says of it."""
        self.check_head()
        return [seen.logits for seen in self._compute(additions, wanted, frozenset(), False)]

    def look(
        self,
        branch: Branch,
        tokens: Sequence[int] = (),
        *,
        at: frozenset[int],
        wanted: int = 1,
        deep: bool = True,
    ) -> Computed:
        """`extend`, looking inside at some positions: at the vectors, and, if `deep`, at attention
        and what each layer added."""
        return self._compute([(branch, tokens)], wanted, at, deep)[0]

    def look_all(
        self,
        additions: Sequence[tuple[Branch, Sequence[int]]],
        *,
        at: frozenset[int] | Sequence[frozenset[int]],
    ) -> list[Computed]:
        """`look` at the vectors of several branches, computed in the same steps: at the same
        positions of all, or of each at its own."""
        return self._compute(additions, 1, at, False)

    def _compute(
        self,
        additions: Sequence[tuple[Branch, Sequence[int]]],
        wanted: int | Sequence[int],
        look: frozenset[int] | Sequence[frozenset[int]],
        deep: bool,
    ) -> list[Computed]:
        for branch, tokens in additions:
            self._check_length(branch.length + len(tokens))
        counts = [wanted] * len(additions) if isinstance(wanted, int) else wanted
        looks = [look] * len(additions) if isinstance(look, frozenset) else look
        tasks = [
            _Computation(self.loop, branch, count)
            for (branch, _), count in zip(additions, counts, strict=True)
        ]

        def add() -> list[_Computation]:
            if len({branch for branch, _ in additions}) < len(additions):
                raise UnspoolError("a branch was named twice; fork it, and name the fork")
            for branch, _ in additions:  # before anything is changed
                self.scheduler.check_idle(branch)
            for task, own, (branch, tokens) in zip(tasks, looks, additions, strict=True):
                task.look, task.deep = own, deep
                self.tree.append(branch, tokens)
            return tasks

        return self.run_tasks(add)

    def run_tasks(self, plan: Callable[[], Sequence[AwaitedTask[Result]]]) -> list[Result]:
        """Compute the tasks that `plan` makes on the engine's thread, and wait for all of them.

        They share one turn in the scheduler with the other work of their caller's scope, and are
        given up as soon as that is cancelled.
        """
        scope, tasks = current_scope(), list[AwaitedTask[Result]]()

        def add() -> None:
            scope.check()
            tasks.extend(plan())
            for task in tasks:
                task.group = scope.group
                task.begin(self.scheduler)

        def give_up() -> None:
            for task in tasks:
                self.loop.fail(task, WorkCancelledError("the work was cancelled"))

        def cancel() -> None:
            with suppress(UnspoolError):  # a closed engine fails its tasks itself
                self.loop.tell(give_up, at_rest=False)

        self.call(add)
        with scope.on_cancel(cancel):
            return [self.loop.wait_for(task.future) for task in tasks]

    def fork(self, branch: Branch) -> Branch:
        return self.call(lambda: self.tree.fork(branch))

    def rewind(self, branch: Branch, length: int) -> None:
        def go_back() -> None:
            self.scheduler.check_idle(branch)
            self.tree.rewind(branch, length)

        self.call(go_back)

    def release(self, branch: Branch) -> None:
        """The branch is done with; its pages may serve others."""

        def close() -> None:
            task = self.scheduler.task_of(branch)
            if task is not None:  # somebody was interrupted while waiting
                self.loop.fail(task, UnspoolError("the branch was released"))
            self.tree.close(branch)

        self.loop.clean_up(close)

    # -- texts that write by themselves --------------------------------------------------------

    def submit(self, request: Request) -> StepStream:
        """Start writing; steps come as they are made."""
        self.check_head()
        self.loop.check_caller(allow_commands=True)  # the steps would never come
        limits = request.limits
        length = len(request.prompt)
        scope = current_scope()
        scope.check()
        self.scheduler.check_fits(min(length + limits.room(length), limits.context))
        self.adapters.number(request.adapter)  # a name that means nothing is refused at once
        if len(self._waiting) >= self.max_waiting:
            raise BusyError(
                f"{len(self._waiting)} requests are waiting already, as many as may; try later"
            )
        TextStream(limits.stop)  # checked and built here: the engine's thread finds it in a cache
        made = request.drafter
        drafter = made(request) if callable(made) else made
        if limits.endless is not None and isinstance(drafter, ReadingDrafter):
            raise SettingsError(
                "a drafting head cannot follow a text beyond the context; leave endless out, or "
                "guess ahead in another way: speculate='lookup'"
            )
        queue, loop, written = StepQueue(), self.loop, list[WrittenText]()

        def begin() -> None:
            try:
                sequence = WrittenText(
                    self.scheduler, self.backend.vocab_size, self.token_bytes, request, queue,
                    drafter, self.adapters.number(request.adapter),
                )  # fmt: skip
                written.append(sequence)
                sequence.group = scope.group
                sequence.begin()
            except BaseException as error:
                if written:
                    written[0].end(error)
                queue.end(error)

        def cancel() -> None:
            for sequence in written:
                sequence.end(None)

        self._waiting.add(queue)
        queue.on_start = lambda: self._waiting.discard(queue)
        try:
            loop.tell(begin, at_rest=False)
        except UnspoolError:  # it is closed
            self._waiting.discard(queue)
            raise
        return StepStream(
            queue, lambda: loop.tell(cancel, at_rest=False), loop.check_alive, loop.check_caller
        )

    # -- the thread below ----------------------------------------------------------------------

    def call(self, command: Callable[[], Result]) -> Result:
        """Have a command carried out on the engine's thread, and wait for what it gives."""
        return self.loop.call(command)

    def close(self) -> None:
        """Stop the thread. What runs is told that the engine is closed."""
        self.loop.check_caller()
        self.loop.close()

    def _check_length(self, length: int) -> None:
        if length == 0:
            raise UnspoolError("a branch needs at least one token")
        if length > self.backend.context:
            raise ContextError(
                f"the text has {length:,} tokens and the model's context holds "
                f"{self.backend.context:,}; shorten it",
                num_tokens=length,
                context=self.backend.context,
            )
        self.scheduler.check_fits(length)
