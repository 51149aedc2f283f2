"""A pass over a canvas: its places are computed in the engine's steps, beside ordinary texts."""

from __future__ import annotations

from unspool.backends.step import Logits
from unspool.engine.branch import Branch
from unspool.engine.engine import AwaitedTask, Engine
from unspool.engine.picking import concat_logits
from unspool.engine.scheduler import Scheduler


class CanvasPass(AwaitedTask[Logits]):
    """Computes a canvas from one position to its end, or to another position.

    Where only a span is computed, all other tokens keep the keys and values of the last full pass.
    If these are lost (by preemption, say), that full pass is computed again first.
    """

    __slots__ = ("engine", "full_pass_tokens", "span", "tokens_to_restore")

    def __init__(
        self,
        engine: Engine,
        branch: Branch,
        first: int,
        stop: int | None = None,
        *,
        full_pass_tokens: tuple[int, ...] | None = None,
        is_intact: bool = True,
    ) -> None:
        """Plan a pass from `first` to `stop`.

        Args:
            engine: Runs the pass.
            branch: The branch of the canvas.
            first: The first position to compute.
            stop: Where to end; None: at the end of the canvas.
            full_pass_tokens: All tokens at the last full pass, if only a span is computed.
            is_intact: Whether the keys and values of that pass are still there.
        """
        super().__init__(branch, branch.length - first)
        self.engine, self.full_pass_tokens, self.compute_end = engine, full_pass_tokens, stop
        self.decoding = True
        self.span = None if full_pass_tokens is None or stop is None else (first, stop)
        # The canvas's current tokens, while the last full pass is computed again.
        self.tokens_to_restore: list[int] | None = None
        if not is_intact:
            self._repeat_full_pass()

    def begin(self, scheduler: Scheduler) -> None:
        if self.span is not None and self.tokens_to_restore is None:
            self.branch.num_computed = self.span[0]
        super().begin(scheduler)

    def preempted(self) -> None:
        if self.span is not None:
            self._repeat_full_pass()

    def _repeat_full_pass(self) -> None:
        """Compute the tokens of the last full pass first."""
        assert self.full_pass_tokens is not None
        if self.tokens_to_restore is None:
            self.tokens_to_restore = self.branch.tail.copy()
        self.compute_end, self.num_logits = None, 1
        self.branch.tail[:] = self.full_pass_tokens
        self.branch.num_computed = 0

    def _restore_tokens(self) -> None:
        assert self.tokens_to_restore is not None
        self.branch.tail[:], self.tokens_to_restore = self.tokens_to_restore, None

    def complete(self) -> None:
        if self.tokens_to_restore is not None and self.span is not None:
            self._restore_tokens()
            self.branch.num_computed, self.compute_end = self.span
            self.num_logits = self.branch.length - self.span[0]
            self.logits.clear()
            return
        self.engine.scheduler.remove(self)
        if self.span is not None:
            self.branch.num_computed = self.branch.length
        self.future.set_result(concat_logits(self.logits))

    def fail(self, error: BaseException) -> None:
        if self.tokens_to_restore is not None:
            self._restore_tokens()
            self.branch.num_computed = 0
        super().fail(error)
