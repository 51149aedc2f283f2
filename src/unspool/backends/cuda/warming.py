"""Warm-up of a backend: runs first steps, which compile its kernels.

Compiled kernels are cached on disk: half a minute the first time, a second or two afterwards.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import numpy as np

from unspool.backends.cuda.backend import CudaBackend
from unspool.backends.step import StepBatch
from unspool.sampling.picker import SamplingRows

_WARMUP_TOKENS = 32  # tokens of the prompt
_MESSAGE_DELAY_S = 2.0  # seconds


def warm_up(backend: CudaBackend) -> None:
    """Run a prefill, a draft, and a next token, greedy and sampled, on the padding page."""
    with _progress("compiling GPU kernels (up to a minute the first time)"):
        for count, temperature in ((_WARMUP_TOKENS, 0.0), (2, 0.0), (1, 0.0), (1, 1.0)):
            count = min(count, backend.context)
            backend.launch(_batch(count, temperature)).result()


def _batch(count: int, temperature: float) -> StepBatch:
    positions = np.arange(count)
    pick = SamplingRows(
        np.array([[temperature, 0.9, 0.0, 1.0, 0.0, 0.0]]),
        np.zeros((1, 6), np.int64),
        np.empty(0, np.int64),
    )
    return StepBatch(
        tokens=np.zeros(count, np.int64),
        positions=positions,
        visible_end=positions + 1,
        row_starts=np.array([0, count]),
        slots=np.zeros(1, np.int64),
        sample_indices=np.array([count - 1]),
        sampling=pick,
    )


@contextmanager
def _progress(task: str) -> Iterator[None]:
    """Print `task` to a terminal if it takes longer than `_MESSAGE_DELAY_S`."""
    if not sys.stderr.isatty():
        yield
        return
    start, printed = perf_counter(), threading.Event()

    def show() -> None:
        printed.set()
        print(f"{task} ...", end="", flush=True, file=sys.stderr)

    timer = threading.Timer(_MESSAGE_DELAY_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if printed.is_set():
            print(f" {perf_counter() - start:.0f} s", file=sys.stderr)
