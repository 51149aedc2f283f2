"""The first steps of a backend, run before anybody waits for one: they compile its kernels.

Compiled kernels are kept on disk, so this takes half a minute once and a second or two afterwards.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from unspool.backends.step import StepBatch
from unspool.sampling.picker import PickRows

if TYPE_CHECKING:
    from unspool.backends.cuda.backend import CudaBackend

_CHUNK = 32  # tokens of the prompt
_TELL_AFTER = 2.0  # seconds


def warm_up(backend: CudaBackend) -> None:
    """A prompt, a draft, and next tokens with and without a draw, on a page that nobody reads."""
    with _telling("preparing the GPU's kernels (up to a minute the first time)"):
        for count, temperature in ((_CHUNK, 0.0), (2, 0.0), (1, 0.0), (1, 1.0)):
            count = min(count, backend.context)
            backend.launch(_batch(count, temperature)).result()


def _batch(count: int, temperature: float) -> StepBatch:
    positions = np.arange(count)
    pick = PickRows(
        np.array([[temperature, 0.9, 0.0, 1.0, 0.0, 0.0]]),
        np.zeros((1, 6), np.int64),
        np.empty(0, np.int64),
    )
    return StepBatch(
        tokens=np.zeros(count, np.int64),
        positions=positions,
        visible_end=positions + 1,
        starts=np.array([0, count]),
        slots=np.zeros(1, np.int64),
        sampled=np.array([count - 1]),
        pick=pick,
    )


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """A line for people who wait, once they have waited a little."""
    if not sys.stderr.isatty():
        yield
        return
    began, told = perf_counter(), threading.Event()

    def tell() -> None:
        told.set()
        print(f"{what} ...", end="", flush=True, file=sys.stderr)

    timer = threading.Timer(_TELL_AFTER, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if told.is_set():
            print(f" {perf_counter() - began:.0f} s", file=sys.stderr)
