"""The command line: `unspool "a prompt"`, and the commands beside it."""

import contextlib
import os
import sys
from pathlib import Path


class _LossyStream:
    """Standard error whose failures (a full disk, a reader that left) are ignored.

    What is written there are remarks: a command must not fail because one is lost.
    """

    def __init__(self, stream: object) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)  # type: ignore[attr-defined]
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()  # type: ignore[attr-defined]


def _open_streams() -> None:
    """Replace streams that the caller closed (`>&-`), and make standard error lossy."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  open to the end
    setattr(sys, "stderr", _LossyStream(sys.stderr))  # noqa: B010  it is no whole TextIO


def main() -> None:
    """Run the command that was typed, and exit.

    Ctrl-C ends it without a word and with 130, also while Python still reads the program's files.
    """
    try:
        _open_streams()
        from unspool.cli import interrupt

        interrupt.leave_on_signal()
        from unspool.cli.main import main as run

        run()
    except KeyboardInterrupt:
        os._exit(130)
