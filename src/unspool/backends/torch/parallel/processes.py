"""The processes of other ranks on this machine, ended with the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

Process = subprocess.Popen[bytes]

_END = 5.0  # seconds to end by itself
_WORKER = "unspool.backends.torch.parallel.worker"


def start(port: int, count: int, threads: int) -> list[Process]:
    """All ranks but the first."""
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    return [
        subprocess.Popen(
            [sys.executable, "-P", "-m", _WORKER, str(port), str(rank), str(count)],
            stdin=subprocess.PIPE,  # closed when this process is gone, in whatever way
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process, which ends them
            env={**environment, "LOCAL_RANK": str(rank)},
        )
        for rank in range(1, count)
    ]


def end(processes: Sequence[Process]) -> None:
    """They end when what they read from is closed; if not, they are ended."""
    for process in processes:
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
    until = time.monotonic() + _END
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def how(process: Process) -> str:
    """In which way it has ended."""
    code = process.returncode
    if code >= 0:
        return f"exit code {code}"
    known = {each.value: each.name for each in signal.Signals}
    return f"killed by {known.get(-code, f'signal {-code}')}"
