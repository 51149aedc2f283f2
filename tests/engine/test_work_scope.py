"""Requests take turns in the engine, and what a thread waits for there can be cancelled."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from helpers.engine_support import new_engine, nothing_leaks, request
from unspool.backends.step import StepBatch, StepLimits
from unspool.engine.canvas import CanvasKind, open_canvas
from unspool.engine.engine import Engine
from unspool.engine.work_scope import WorkScope
from unspool.errors import WorkCancelledError


class Gate:
    """Holds back an engine's steps, and keeps the tokens of each."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[list[int]] = []
        self.is_held = threading.Event()
        self._open = threading.Event()
        self._launch: Callable[[StepBatch], Any] = engine.backend.launch
        engine.backend.launch = self._wait_and_launch  # type: ignore[method-assign]

    def _wait_and_launch(self, batch: StepBatch) -> Any:
        self.steps.append(batch.tokens.tolist())
        self.is_held.set()
        assert self._open.wait(30)
        return self._launch(batch)

    def wait(self) -> None:
        assert self.is_held.wait(30), "no step was launched"

    def open(self) -> None:
        self._open.set()


def small_steps(**shape: Any) -> Engine:
    limits = StepLimits(max_rows=8, prefill_tokens=32, prefill_beside_decode=32)
    return new_engine(pages=2000, limits=limits, **shape)


def random_prompt(seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(39) for _ in range(60)]


def read(engine: Engine, prompt: list[int], scope: WorkScope) -> None:
    with scope.active():
        branch = engine.open(prompt)
        try:
            engine.extend(branch)
        finally:
            engine.release(branch)


@pytest.mark.parametrize("length", [12, 60])
def test_many_rows_of_one_request_delay_another_by_few_steps(length: int):
    """A request of 100 rows comes first; more rows than a step may have."""
    engine, scope = small_steps(), WorkScope()
    many = [engine.open(random_prompt(n)[:length]) for n in range(100)]
    single = engine.open([39] * 20)  # a token that no other row has
    gate = Gate(engine)

    def read_many() -> None:
        with scope.active():
            engine.extend_all([(branch, []) for branch in many])

    with ThreadPoolExecutor(2) as threads:
        work = [threads.submit(read_many)]
        gate.wait()
        work.append(threads.submit(engine.extend, single))
        while not engine.loop._commands:
            threading.Event().wait(0.001)
        gate.open()
        for job in work:
            job.result(60)
    assert len(gate.steps) > 30
    assert next(n for n, tokens in enumerate(gate.steps) if 39 in tokens) < 8
    for branch in (*many, single):
        engine.release(branch)
    nothing_leaks(engine)
    engine.close()


def test_rows_of_one_request_are_computed_in_their_order():
    engine, scope = small_steps(), WorkScope()
    branches = [engine.open([n] * 30) for n in range(20)]
    gate = Gate(engine)
    gate.open()
    with scope.active():
        engine.extend_all([(branch, []) for branch in branches])
    firsts = [next(i for i, step in enumerate(gate.steps) if n in step) for n in range(20)]
    assert firsts == sorted(firsts)
    for branch in branches:
        engine.release(branch)
    nothing_leaks(engine)
    engine.close()


@pytest.mark.parametrize("overlaps", [False, True])
def test_cancelled_work_is_not_computed(overlaps: bool):
    engine, scope = small_steps(overlaps=overlaps), WorkScope()
    gate = Gate(engine)
    with ThreadPoolExecutor(3) as threads:
        work = [threads.submit(read, engine, [n] * 300, scope) for n in range(3)]
        gate.wait()
        scope.cancel()
        num_steps = len(gate.steps)
        gate.open()
        for job in work:
            with pytest.raises(WorkCancelledError):
                job.result(30)
    assert len(gate.steps) <= num_steps + overlaps
    with scope.active(), pytest.raises(WorkCancelledError):
        engine.open([1])
    with scope.active(), pytest.raises(WorkCancelledError):
        engine.submit(request([1, 2]))
    nothing_leaks(engine)
    assert list(engine.submit(request([1, 2, 3], count=3)))  # others are not concerned
    engine.close()


def test_reading_a_stream_and_a_canvas_can_be_cancelled():
    engine, scopes = small_steps(), [WorkScope(), WorkScope()]
    gate = Gate(engine)

    def write() -> None:
        with scopes[0].active():
            for _ in engine.submit(request([1] * 200, count=200)):
                pass

    def fill() -> None:
        kind = CanvasKind(mask_id=4, sight="causal")
        with scopes[1].active(), open_canvas(engine, [2] * 200, 8, kind) as canvas:
            canvas.logits()

    with ThreadPoolExecutor(2) as threads:
        work = [threads.submit(job) for job in (write, fill)]
        gate.wait()
        for scope in scopes:
            scope.cancel()
        gate.open()
        for job in work:
            with pytest.raises(WorkCancelledError):
                job.result(30)
    nothing_leaks(engine)
    engine.close()


def test_a_callback_is_called_once_and_only_within_its_context():
    scope, calls = WorkScope(), list[str]()
    with scope.on_cancel(lambda: calls.append("left")):
        pass
    with scope.on_cancel(lambda: calls.append("during")):
        scope.cancel()
        scope.cancel()
    with scope.on_cancel(lambda: calls.append("late")):
        pass
    assert calls == ["during", "late"]
