"""The null model as a device: a separate thread computes the steps in order, after random delays,
while the engine continues. With `faults`, some launches and some results fail."""

from __future__ import annotations

import queue
import random
import threading
import time
from typing import Any

from helpers.null_model import NullModel
from unspool.backends.step import StepBatch, StepResult


class SlowDevice(NullModel):
    """Each step takes at most `delay` seconds; one in `faults` fails, at random."""

    def __init__(self, *, delay: float = 0.002, faults: int = 0, seed: int = 0, **shape: Any):
        super().__init__(overlaps=True, **shape)
        self.delay, self.faults, self.chance = delay, faults, random.Random(seed)
        self.launches: list[tuple[StepBatch, int]] = []  # with how many were not read yet
        self.read = 0
        self._launched: queue.SimpleQueue[_Flight] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def launch(self, batch: StepBatch) -> _Flight:  # type: ignore[override]
        if self.faults and self.chance.randrange(2 * self.faults) == 0:
            raise RuntimeError("not launched")
        self.launches.append((batch, len(self.launches) - self.read))
        flight = _Flight(self, batch)
        self._launched.put(flight)
        return flight

    def _run(self) -> None:
        while True:
            flight = self._launched.get()
            time.sleep(self.chance.random() * self.delay)
            try:
                flight.outcome = self._compute(flight.batch)
            except BaseException as error:
                flight.outcome = error
            flight.done.set()


class _Flight:
    def __init__(self, device: SlowDevice, batch: StepBatch) -> None:
        self.device, self.batch, self.done = device, batch, threading.Event()
        self.outcome: StepResult | BaseException | None = None

    def ready(self) -> bool:
        return self.done.is_set()

    def result(self) -> StepResult:
        assert self.done.wait(60)
        self.device.read += 1
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        if self.device.faults and self.device.chance.randrange(2 * self.device.faults) == 0:
            raise RuntimeError("not read")
        assert self.outcome is not None
        return self.outcome
