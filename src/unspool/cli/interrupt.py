"""Ctrl-C: it ends a command at once, without a word, and with exit code 130.

Python makes an exception of it, which is right only where somebody waits for one: raised while
modules are imported it may be swallowed or printed, and threads that still load a model are waited
for. So the process leaves where it stands, but for those parts of a command that say `raised()`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

INTERRUPTED = 130  # what shells say of a program that Ctrl-C has ended
_SHOW_CURSOR = "\x1b[?25h"  # which a progress bar may have hidden


def leave_on_signal() -> None:
    """From now on Ctrl-C ends the process where it stands."""
    if not _is_ignored():
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def raised() -> Iterator[None]:
    """In here Ctrl-C is a KeyboardInterrupt, for a command that puts something in order then."""
    if _is_ignored():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_ignored() -> bool:
    """As in the background of a shell, where Ctrl-C is meant for others."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def _leave(*_: object) -> NoReturn:
    with suppress(Exception):  # whoever read our output may have gone
        if sys.stderr.isatty():  # the prompt of the shell shall not stand behind ^C
            sys.stderr.write(f"{_SHOW_CURSOR}\n")
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(INTERRUPTED)
