"""Work scopes: group the engine's rows by request, and cancel blocking calls of a thread.

    scope = WorkScope()
    with scope.active():          # on a thread
        lm.score(text)            # raises WorkCancelledError soon after `scope.cancel()`

A scope is ambient, like a context variable: functions between the caller and the engine need not
know of it. Without one, a call cannot be cancelled, and each call counts as a separate request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from unspool.errors import WorkCancelledError


class WorkScope:
    """The work of one request on one thread. `cancel` may be called from any thread."""

    def __init__(self, group: object = None) -> None:
        """`group`: the request whose rows share a turn in the scheduler; by default this scope."""
        self.group = self if group is None else group
        self._callbacks: list[Callable[[], object]] = []
        self._cancelled = False
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """End what the thread waits for; later calls to the engine raise."""
        with self._lock:
            self._cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def check(self) -> None:
        """Raise if the work was cancelled."""
        if self._cancelled:
            raise WorkCancelledError(
                "the work was cancelled: its client disconnected, or it timed out"
            )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the scope of the thread's work inside the context."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextmanager
    def on_cancel(self, callback: Callable[[], object]) -> Iterator[None]:
        """Call back once if the work is cancelled inside the context, on the thread that cancels;
        immediately if it was cancelled before."""
        with self._lock:
            is_late = self._cancelled
            if not is_late:
                self._callbacks.append(callback)
        if is_late:
            callback()
        try:
            yield
        finally:
            with self._lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)


_current: ContextVar[WorkScope | None] = ContextVar("unspool_work_scope", default=None)


def current_scope() -> WorkScope:
    """Return the scope of this thread's work; a new one, never cancelled, if there is none."""
    return _current.get() or WorkScope()
