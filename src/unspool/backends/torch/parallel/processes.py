"""Processes of the other ranks on this machine; they end with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

Process = subprocess.Popen[bytes]

_EXIT_TIMEOUT_S = 5.0  # before a process is killed
_WORKER_MODULE = "unspool.backends.torch.parallel.worker"


def start_processes(port: int, count: int, threads: int) -> list[Process]:
    """Start ranks 1 to count - 1."""
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    return [
        subprocess.Popen(
            [sys.executable, "-P", "-m", _WORKER_MODULE, str(port), str(rank), str(count)],
            stdin=subprocess.PIPE,  # closed by the system when this process ends
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to this process only, which stops them
            env={**environment, "LOCAL_RANK": str(rank)},
        )
        for rank in range(1, count)
    ]


def stop_processes(processes: Sequence[Process]) -> None:
    """Close their stdin, on which they exit; kill those that do not."""
    for process in processes:
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def exit_reason(process: Process) -> str:
    """How an ended process ended."""
    code = process.returncode
    if code >= 0:
        return f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"
