"""A pass over a canvas: its places computed in the engine's steps, beside ordinary texts."""

from __future__ import annotations

from unspool.backends.step import Logits
from unspool.engine.branch import Branch
from unspool.engine.engine import AwaitedTask, Engine
from unspool.engine.picking import joined
from unspool.engine.scheduler import Scheduler


class Pass(AwaitedTask[Logits]):
    """A canvas that is computed from one position on, or from one to another.

    seen   all tokens as they were in the last whole pass, where only a span is computed: the others
           keep the keys and values of that pass.
    intact whether those are still there; otherwise that pass is computed again first.
    """

    __slots__ = ("engine", "seen", "span", "tokens")

    def __init__(
        self,
        engine: Engine,
        branch: Branch,
        first: int,
        stop: int | None = None,
        *,
        seen: tuple[int, ...] | None = None,
        intact: bool = True,
    ) -> None:
        super().__init__(branch, branch.length - first)
        self.engine, self.seen, self.stop = engine, seen, stop
        self.decoding = True
        self.span = None if seen is None or stop is None else (first, stop)
        self.tokens: list[int] | None = None  # to go on with, once `seen` is computed again
        if not intact:
            self._see_again()

    def begin(self, scheduler: Scheduler) -> None:
        if self.span is not None and self.tokens is None:
            self.branch.computed = self.span[0]
        super().begin(scheduler)

    def preempted(self) -> None:
        if self.span is not None:
            self._see_again()

    def _see_again(self) -> None:
        """First the last whole pass, as it was; then what is wanted."""
        assert self.seen is not None
        if self.tokens is None:
            self.tokens = self.branch.tail.copy()
        self.stop, self.wanted = None, 1
        self.branch.tail[:] = self.seen
        self.branch.computed = 0

    def _go_on(self) -> None:
        """With the tokens that the canvas has now."""
        assert self.tokens is not None
        self.branch.tail[:], self.tokens = self.tokens, None

    def complete(self) -> None:
        if self.tokens is not None and self.span is not None:
            self._go_on()
            self.branch.computed, self.stop = self.span
            self.wanted = self.branch.length - self.span[0]
            self.logits.clear()
            return
        self.engine.scheduler.remove(self)
        if self.span is not None:
            self.branch.computed = self.branch.length
        self.future.set_result(joined(self.logits))

    def fail(self, error: BaseException) -> None:
        if self.tokens is not None:
            self._go_on()
            self.branch.computed = 0
        super().fail(error)
