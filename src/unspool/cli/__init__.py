"""The command line: `unspool "a prompt"` and the other commands."""

import contextlib
import gc
import os
import sys
from pathlib import Path


class _LossyStream:
    """Standard error that ignores failed writes (full disk, closed pipe).

    Only remarks are written there; a lost one must not make a command fail.
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
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  open until exit
    setattr(sys, "stderr", _LossyStream(sys.stderr))  # noqa: B010  not a complete TextIO


def main() -> None:
    """Run the command in sys.argv, and exit.

    Ctrl-C exits silently with code 130, also while modules are still being imported.
    """
    gc.set_threshold(20_000)  # collections during the imports take a tenth of a command's start
    try:
        _open_streams()
        from unspool.cli import interrupt

        interrupt.exit_on_signal()
        from unspool.cli.main import main as run

        run()
    except KeyboardInterrupt:
        os._exit(130)
