"""Sequences of a draft model: one backend for all of them, driven by the caller's thread.

A drafter runs on the engine thread of the target model, which must not wait for another thread. So
the draft model has no thread: the caller that requests logits runs its steps. Its sequences are
branches of one tree and share their common prefixes. When memory is short, the least recently used
sequence loses its pages and is recomputed when needed.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import count

from unspool.backends.step import Logits
from unspool.engine.branch import Branch
from unspool.engine.loop import Loop
from unspool.engine.scheduler import EngineTask
from unspool.session import Session

_MIN_TOKENS = 4096  # KV-cache capacity of the backend
_MAX_TOKENS = 1 << 17  # ... unless a single text is longer
_LARGEST_PAGE = 256  # tokens: spare room for a partly filled page
_MIN_STATES = 32  # of recurrent layers: more than the tokens of a draft
_STATES_PER_SEQUENCE = 4


class _UpdateTask(EngineTask):
    """Task that computes the new tokens of a draft sequence."""

    __slots__ = ("done", "error", "loop")

    def __init__(self, loop: Loop, branch: Branch) -> None:
        super().__init__(branch)
        self.loop, self.done = loop, False
        self.error: BaseException | None = None

    def complete(self) -> None:
        self.loop.scheduler.remove(self)
        self.done = True

    def fail(self, error: BaseException) -> None:
        self.done, self.error = True, error


class DraftSequences:
    """The sequences of one draft model. Thread-safe; the backend is built on first use."""

    def __init__(self, model: Session) -> None:
        model.config.require_causal()
        self._model = model
        self._lock = threading.Lock()
        self._loop: Loop | None = None
        self._tokens = 0  # capacity of the backend
        self._numbers = count()
        self._capacities: dict[int, int] = {}  # of the open sequences
        self._branches: dict[int, Branch] = {}  # of computed sequences, least recently used first
        self._closed: deque[int] = deque()  # closed, not yet released

    def open(self, capacity: int) -> DraftSequence:
        """Open a sequence of at most `capacity` tokens."""
        with self._lock:
            self._release_closed()
            number = next(self._numbers)
            self._capacities[number] = capacity
        return DraftSequence(self, number)

    def close(self, number: int) -> None:
        """Release a sequence. Never blocks: the garbage collector may call it anywhere."""
        self._closed.append(number)
        self._release_if_idle()

    def read(
        self, number: int, previous: Sequence[int], tokens: Sequence[int], max_tokens: int | None
    ) -> Logits | None:
        """Update a sequence from `previous` to `tokens`.

        Computes about `max_tokens` tokens; None: as many as one step of the backend.

        Returns:
            The logits after the last token, or None if it was not reached.
        """
        try:
            with self._lock:
                self._release_closed()
                return self._read(number, previous, tokens, max_tokens)
        finally:
            self._release_if_idle()

    def _read(
        self, number: int, previous: Sequence[int], tokens: Sequence[int], max_tokens: int | None
    ) -> Logits | None:
        loop = self._ready_loop()
        tree, branch = loop.tree, self._branches.pop(number, None)
        if branch is None:
            branch = tree.open(tokens)
        else:
            shared = min(common_length(previous, tokens), len(tokens) - 1)
            tree.rewind(branch, shared, store=False)
            tree.append(branch, tokens[shared:])
        self._branches[number] = branch  # most recently used last
        if branch.num_computed == 0 and not branch.pages:
            tree.adopt(branch)
        task = _UpdateTask(loop, branch)
        max_tokens = loop.scheduler.limits.prefill_tokens if max_tokens is None else max_tokens
        if branch.length - branch.num_computed > max_tokens:
            task.compute_end = branch.num_computed + max_tokens
        self._free_pages(loop, branch)
        loop.scheduler.add(task)
        while not task.done:
            loop.work()
        if task.error is not None:
            raise task.error
        return task.logits[-1][-1] if task.logits else None

    def _ready_loop(self) -> Loop:
        """The loop, its KV cache sized for all open sequences within the limits."""
        longest = max(self._capacities.values(), default=1)
        total = max(_MIN_TOKENS, longest, min(sum(self._capacities.values()), _MAX_TOKENS))
        if self._loop is None or total > self._tokens:
            self._loop, self._tokens = None, 0  # first, so that both never exist together
            self._branches.clear()
            tokens = 1 << (total - 1).bit_length()
            config = self._model.config
            # 32-bit floats are the widest KV cache.
            memory = (tokens + _LARGEST_PAGE) * config.kv_floats_per_token * 4
            if config.state_bytes:  # recurrent states get half of it
                states = max(_MIN_STATES, _STATES_PER_SEQUENCE * len(self._capacities))
                memory = 2 * max(memory, states * config.state_bytes)
            backend = self._model.model.backend(memory=memory, context=self._model.context)
            self._loop, self._tokens = Loop(backend), tokens
        return self._loop

    def _free_pages(self, loop: Loop, branch: Branch) -> None:
        """Preempt least recently used sequences until this one fits."""
        tree = loop.tree
        needed = -(-branch.length // tree.page_size) - branch.node.depth - len(branch.pages) + 1
        for other in list(self._branches.values()):
            if needed <= tree.available:
                return
            if other is not branch:
                tree.preempt(other)

    def _release_closed(self) -> None:
        while self._closed:
            number = self._closed.popleft()
            self._capacities.pop(number, None)
            branch = self._branches.pop(number, None)
            if branch is not None and self._loop is not None:
                self._loop.tree.close(branch)
        if not self._capacities and self._tokens > _MIN_TOKENS:
            self._loop, self._tokens = None, 0  # free the large KV cache

    def _release_if_idle(self) -> None:
        """Release closed sequences, unless another thread is working here: it does so at the
        end."""
        while self._closed and self._lock.acquire(blocking=False):
            try:
                self._release_closed()
            finally:
                self._lock.release()


class DraftSequence:
    """One sequence of a draft model. Not thread-safe."""

    def __init__(self, texts: DraftSequences, number: int) -> None:
        self._texts, self._number = texts, number
        self._previous: list[int] = []
        self._end = weakref.finalize(self, texts.close, number)

    def logits(self, tokens: Sequence[int], max_tokens: int | None = None) -> Logits | None:
        """Logits after these tokens; None if more calls are needed to compute them all."""
        previous, self._previous = self._previous, list(tokens)
        return self._texts.read(self._number, previous, tokens, max_tokens)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix, by bisection: comparing list slices is fast."""
    low, high = 0, min(len(first), len(second))
    if list(first[:high]) == list(second[:high]):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if list(first[low:middle]) == list(second[low:middle]):
            low = middle
        else:
            high = middle
    return low
