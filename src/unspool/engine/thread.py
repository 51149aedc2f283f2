"""A supervised thread that owns some state and runs commands on it for other threads.

Commands run between two rounds of the thread's own work, so no other thread ever sees its state
half changed. If the thread has died, callers get an error instead of waiting for ever.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from unspool.errors import UnspoolError

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

    # -- implemented by subclasses ------------------------------------------------------------

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

    # -- from any thread ---------------------------------------------------------------------

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
        if self._calling and self._is_own_thread():
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
        if self._is_own_thread() and not self._calling:  # never waits
            self.post(command, at_rest=at_rest)
        else:
            self.call(command, at_rest=at_rest)

    def check_caller(self, *, allow_commands: bool = False) -> None:
        """Refuse to wait on the engine's own thread: it would wait for itself.

        Raises:
            UnspoolError: Called on the engine's thread, and not by a command that is allowed to.
        """
        if self._is_own_thread() and not (allow_commands and self._calling):
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
        if self._thread is not None and not self._is_own_thread():
            self._thread.join()
            atexit.unregister(self.close)

    def _is_own_thread(self) -> bool:
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

    # -- on the thread -----------------------------------------------------------------------

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
            self._run_commands()
            self.fail_all(UnspoolError("the engine was closed"))

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._commands or self.has_work() or self._closed):
                self._wake.wait()
            return not self._closed

    def _run_commands(self) -> None:
        while self._commands:
            command, at_rest = self._commands.popleft()
            if at_rest:
                self.finish_in_flight()
            command()
