"""A command in a terminal of its own, as a person has it: what it shows, what one types."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from types import TracebackType

_CONTROL = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|\][^\x07]*\x07|[()][A-Z0-9]|[=>])|\r")


class Terminal:
    """`unspool ...` with a pseudo-terminal as its input, output and errors."""

    def __init__(self, *arguments: str, rows: int = 24, columns: int = 80, **env: str) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        # Of a session of its own, whose terminal this is: only then is ^C a signal.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "LINES": "", **env},
        )  # fmt: skip
        os.close(theirs)
        self._ours = ours
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.raw = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait(30)
        os.close(self._ours)

    @property
    def display_text(self) -> str:
        """All that was written so far, without what steers the terminal."""
        return _CONTROL.sub("", self.raw)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, words: str, seconds: float = 60.0) -> str:
        """Read until these words have come; gives all that was written."""
        until = time.monotonic() + seconds
        while words not in self.display_text:
            assert time.monotonic() < until, (
                f"{words!r} did not come: {self.display_text[-2000:]!r}"
            )
            assert self._read(0.1), f"it ended without {words!r}: {self.display_text[-2000:]!r}"
        return self.display_text

    def ended(self, seconds: float = 60.0, again: str = "") -> int:
        """Read to the end; gives the exit code. `again` is typed each second until then: a signal
        that comes just before readline waits is seen by Python only at the next key."""
        began = typed = time.monotonic()
        while self._read(0.1):
            now = time.monotonic()
            assert now < began + seconds, f"it goes on: {self.display_text[-2000:]!r}"
            if again and now > typed + 1:
                typed = now
                with contextlib.suppress(OSError):
                    self.type(again)
        return self.process.wait(30)

    def _read(self, seconds: float) -> bool:
        """Take in what there is; False once nothing can come any more."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # how Linux says that the other side is closed
            return False
        self.raw += self._decoder.decode(data)
        return bool(data)


_START = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from unspool.cli import main
main()
"""
