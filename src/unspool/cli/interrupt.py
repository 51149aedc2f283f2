"""Ctrl-C: exit immediately and silently with code 130, except inside `raise_on_signal()`.

Python raises KeyboardInterrupt wherever the main thread is. During imports the exception may be
swallowed or printed, and the interpreter would wait for threads that still load a model. So the
process exits directly, except in those parts of a command that clean up after Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

INTERRUPTED = 130  # the exit code that shells use for SIGINT
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar may have hidden it


def exit_on_signal() -> None:
    """Make Ctrl-C end the process immediately."""
    if not _is_ignored():
        signal.signal(signal.SIGINT, _exit)


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt inside this context, for commands that clean up."""
    if _is_ignored():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_ignored() -> bool:
    """Whether Ctrl-C is ignored, as for a background process of a shell."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def _exit(*_: object) -> NoReturn:
    with suppress(Exception):  # the reader of the output may be gone
        if sys.stderr.isatty():  # so that the shell prompt does not follow ^C on the same line
            sys.stderr.write(f"{_SHOW_CURSOR}\n")
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(INTERRUPTED)
