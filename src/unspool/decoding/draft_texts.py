"""The texts that a draft model reads: one backend for all of them, driven by the caller's thread.

A drafter runs on the engine's thread of the model it drafts for, which must not wait for another
thread. So the draft model has no thread: whoever asks for logits runs its steps. Its texts are
branches of one tree and share their computed beginnings. Where memory is short, the text that was
used least recently loses its pages and is read again when it is needed.
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
from unspool.engine.scheduler import Task
from unspool.session import Session

_LEAST_TOKENS = 4096  # that the backend holds
_MOST_TOKENS = 1 << 17  # ... unless one text alone is longer
_LARGEST_PAGE = 256  # tokens: room for one that is not filled
_LEAST_STATES = 32  # of recurrent layers: more than a drafter guesses at once
_STATES_PER_TEXT = 4


class _Reading(Task):
    """A draft text that is brought up to date."""

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


class DraftTexts:
    """The texts of one draft model. Any thread may use it; it is built with the first text."""

    def __init__(self, model: Session) -> None:
        model.config.check_left_to_right()
        self._model = model
        self._lock = threading.Lock()
        self._loop: Loop | None = None
        self._tokens = 0  # that the backend holds
        self._numbers = count()
        self._capacities: dict[int, int] = {}  # of the open texts
        self._branches: dict[int, Branch] = {}  # of those that were read, least recently used first
        self._closed: deque[int] = deque()  # texts nobody needs any more, not yet released

    def open(self, capacity: int) -> DraftText:
        """A new text of at most `capacity` tokens."""
        with self._lock:
            self._release_closed()
            number = next(self._numbers)
            self._capacities[number] = capacity
        return DraftText(self, number)

    def close(self, number: int) -> None:
        """Release a text. Never waits: a garbage collector may call it anywhere."""
        self._closed.append(number)
        self._tidy()

    def read(
        self, number: int, known: Sequence[int], tokens: Sequence[int], most: int | None
    ) -> Logits | None:
        """Bring a text to these tokens, of which it had the `known` ones.

        Computes about `most` tokens at most, None: as many as one step of the backend reads.

        Returns:
            The logits behind the last token, or None if it was not reached.
        """
        try:
            with self._lock:
                self._release_closed()
                return self._read(number, known, tokens, most)
        finally:
            self._tidy()

    def _read(
        self, number: int, known: Sequence[int], tokens: Sequence[int], most: int | None
    ) -> Logits | None:
        loop = self._ready_loop()
        tree, branch = loop.tree, self._branches.pop(number, None)
        if branch is None:
            branch = tree.open(tokens)
        else:
            shared = min(common_length(known, tokens), len(tokens) - 1)
            tree.rewind(branch, shared, store=False)
            tree.append(branch, tokens[shared:])
        self._branches[number] = branch  # the most recently used is the last
        if branch.computed == 0 and not branch.pages:
            tree.adopt(branch)
        task = _Reading(loop, branch)
        most = loop.scheduler.limits.prefill_tokens if most is None else most
        if branch.length - branch.computed > most:
            task.stop = branch.computed + most
        self._make_room(loop, branch)
        loop.scheduler.add(task)
        while not task.done:
            loop.work()
        if task.error is not None:
            raise task.error
        return task.logits[-1][-1] if task.logits else None

    def _ready_loop(self) -> Loop:
        """The backend, with room for all open texts as far as that is allowed."""
        longest = max(self._capacities.values(), default=1)
        total = max(_LEAST_TOKENS, longest, min(sum(self._capacities.values()), _MOST_TOKENS))
        if self._loop is None or total > self._tokens:
            self._loop, self._tokens = None, 0  # first, so that both are never held at once
            self._branches.clear()
            tokens = 1 << (total - 1).bit_length()
            config = self._model.config
            # 32 bits a number are the widest that a backend keeps.
            memory = (tokens + _LARGEST_PAGE) * config.kv_numbers * 4
            if config.state_bytes:  # half of it is theirs
                states = max(_LEAST_STATES, _STATES_PER_TEXT * len(self._capacities))
                memory = 2 * max(memory, states * config.state_bytes)
            backend = self._model.model.backend(memory=memory, context=self._model.context)
            self._loop, self._tokens = Loop(backend), tokens
        return self._loop

    def _make_room(self, loop: Loop, branch: Branch) -> None:
        """Take pages from the texts used least recently until this one fits."""
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
        if not self._capacities and self._tokens > _LEAST_TOKENS:
            self._loop, self._tokens = None, 0  # what was needed for many or long texts

    def _tidy(self) -> None:
        """Release closed texts, unless somebody is at work here, who does it in the end."""
        while self._closed and self._lock.acquire(blocking=False):
            try:
                self._release_closed()
            finally:
                self._lock.release()


class DraftText:
    """One text that a draft model reads. Not thread-safe."""

    def __init__(self, texts: DraftTexts, number: int) -> None:
        self._texts, self._number = texts, number
        self._known: list[int] = []
        self._end = weakref.finalize(self, texts.close, number)

    def logits(self, tokens: Sequence[int], most: int | None = None) -> Logits | None:
        """What follows these tokens; None if so many are unread that another call is needed."""
        known, self._known = self._known, list(tokens)
        return self._texts.read(self._number, known, tokens, most)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with alike; halving steps, as comparing lists is quick."""
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
