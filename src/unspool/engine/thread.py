"""A thread that owns something, carries out what others want of it, and cannot die unnoticed.

Other threads hand it commands, which it carries out between two rounds of its own work, so nobody
ever sees what it owns half changed. If it is gone all the same, callers get an error, never a wait.
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
_LOOK_UP = 1.0  # seconds after which who waits asks whether the thread is still there


class SupervisedThread:
    """Started by the first command; what it does all day is said by a subclass."""

    def __init__(self) -> None:
        self._commands: deque[tuple[Callable[[], object], bool]] = deque()  # (what, at rest?)
        self._wake = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()  # that the thread lives in
        self._calling = False  # whether the thread carries out a command of `call`

    # -- what a subclass does -----------------------------------------------------------------

    def has_work(self) -> bool:
        raise NotImplementedError

    def work(self) -> None:
        """One round."""
        raise NotImplementedError

    def pause(self) -> None:
        """Called before a command that wants it: afterwards nothing may be on its way."""
        raise NotImplementedError

    def fail_everyone(self, error: BaseException) -> None:
        """An error that concerns nobody in particular."""
        raise NotImplementedError

    # -- from any thread ---------------------------------------------------------------------

    def call(self, command: Callable[[], Result]) -> Result:
        """Have a command carried out between two steps, and wait for what it gives.

        A command may call others, which are carried out at once.

        Raises:
            UnspoolError: Called on the engine's thread, but not by a command.
        """
        if self._calling and self._is_own_thread():
            return command()
        self.check_caller()
        future: Future[Result] = Future()

        def carry_out() -> None:
            self._calling = True
            try:
                future.set_result(command())
            except BaseException as error:
                future.set_exception(error)
            finally:
                self._calling = False

        self.tell(carry_out)
        return self.wait_for(future)

    def wait_for(self, future: Future[Result]) -> Result:
        """A future's result; an error if the thread that was to give it is gone."""
        self.check_caller()
        while True:
            try:
                return future.result(_LOOK_UP)
            except TimeoutError:
                if future.done():
                    return future.result()
                self.check_alive()

    def tell(self, command: Callable[[], object], *, at_rest: bool = True) -> None:
        """Have a command carried out between two rounds; do not wait. If not `at_rest`, what is on
        its way stays so: for commands that change nothing which that could concern."""
        self._check_process()
        with self._wake:
            if self._closed:
                raise UnspoolError("the engine is closed")
            if self._thread is None:
                self._process = os.getpid()
                thread = threading.Thread(target=self._work, name="unspool-engine", daemon=True)
                thread.start()  # before others see it: one that has not started looks dead
                self._thread = thread
                # A thread that is in the middle of a step must not meet the end of the process.
                atexit.register(self.close)
            self._commands.append((command, at_rest))
            self._wake.notify()

    def clean_up(self, command: Callable[[], object]) -> None:
        """Carry out a command that releases something, and wait for it.

        On the engine's own thread, where the garbage collector may end a generator, it is queued.
        """
        if self._is_own_thread() and not self._calling:  # never waits
            self.tell(command)
        else:
            self.call(command)

    def check_caller(self, *, allow_commands: bool = False) -> None:
        """Refuse to wait on the engine's own thread, which would wait for itself.

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
        if self._thread is not None and not self._is_own_thread():
            self._thread.join()
            atexit.unregister(self.close)

    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

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
                        self.work()
                except BaseException as error:  # it concerns nobody in particular
                    self.fail_everyone(error)
        finally:
            with self._wake:
                self._closed = True
            self._carry_out_commands()
            self.fail_everyone(UnspoolError("the engine was closed"))

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._commands or self.has_work() or self._closed):
                self._wake.wait()
            return not self._closed

    def _carry_out_commands(self) -> None:
        while self._commands:
            command, at_rest = self._commands.popleft()
            if at_rest:
                self.pause()
            command()
