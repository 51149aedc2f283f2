"""A command in a pseudo-terminal: read what it shows, type keys."""

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
        controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        # In its own session with this controlling terminal: only then is ^C a signal.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, *arguments],
            stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "LINES": "", **env},
        )  # fmt: skip
        os.close(terminal)
        self._controller = controller
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
        os.close(self._controller)

    @property
    def display_text(self) -> str:
        """All output so far, without control sequences."""
        return _CONTROL.sub("", self.raw)

    def type(self, keys: str) -> None:
        os.write(self._controller, keys.encode())

    def wait_for(self, words: str, seconds: float = 60.0) -> str:
        """Read until the output contains `words`; returns all output."""
        until = time.monotonic() + seconds
        while words not in self.display_text:
            assert time.monotonic() < until, (
                f"{words!r} was not printed: {self.display_text[-2000:]!r}"
            )
            assert self._read(0.1), (
                f"the command ended without {words!r}: {self.display_text[-2000:]!r}"
            )
        return self.display_text

    def ended(self, seconds: float = 60.0, again: str = "") -> int:
        """Read to the end; gives the exit code. `again` is typed each second until then: a signal
        that comes just before readline waits is seen by Python only at the next key."""
        began = typed = time.monotonic()
        while self._read(0.1):
            now = time.monotonic()
            assert now < began + seconds, f"still running: {self.display_text[-2000:]!r}"
            if again and now > typed + 1:
                typed = now
                with contextlib.suppress(OSError):
                    self.type(again)
        return self.process.wait(30)

    def _read(self, seconds: float) -> bool:
        """Read available output; False at the end of file."""
        if not select.select([self._controller], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._controller, 65536)
        except OSError:  # Linux: the other side is closed
            return False
        self.raw += self._decoder.decode(data)
        return bool(data)


_START = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from unspool.cli import main
main()
"""
