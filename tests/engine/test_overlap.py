"""The asynchronous loop on a slow device: the same texts beside any work, also if steps fail."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import null_model
from helpers.drafts_support import Says, garbage
from helpers.engine_support import (
    expected,
    new_engine,
    nothing_leaks,
    pause_thread,
    request,
)
from helpers.slow_device import SlowDevice
from unspool.engine.canvas import CanvasKind, open_canvas
from unspool.engine.engine import Engine, _Computation
from unspool.engine.reasoning import ReasoningSpec
from unspool.engine.request import Limits, Request
from unspool.errors import WorkCancelledError
from unspool.model.adapters import Adapter
from unspool.sampling import SamplingSettings
from unspool.sampling.candidates import BadLogitsError
from unspool.text.reasoning import OutputStart, ReasoningFormat

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from stress import ReferenceText, make_texts, stress, write_alone

VOCABULARY = 40


def piece(token: int) -> bytes:
    return b"%d " % token


def asked_alone(count: int, seed: int) -> list[ReferenceText]:
    """Texts of every kind, as an engine that does nothing ahead writes them."""
    engine = Engine(null_model.NullModel(pages=400, vocab_size=VOCABULARY), piece)
    texts = make_texts(VOCABULARY, 60, count, seed)
    write_alone(engine, texts)
    engine.close()
    return texts


@pytest.mark.parametrize(("pages", "delay"), [(1200, 0.0), (90, 0.004)])
def test_whatever_goes_on_beside_them_texts_are_the_same(pages: int, delay: float):
    texts = asked_alone(36, seed=pages)
    device = SlowDevice(pages=pages, vocab_size=VOCABULARY, delay=delay)
    engine = Engine(device, piece)
    num_texts = 0
    while num_texts < 9 or device.has_placeholder < 100:  # twice on a busy machine
        tally = stress(engine, texts, seconds=0.7, at_once=8, seed=pages)
        assert not tally.differing.total(), tally.differing
        num_texts += tally.texts.total()
    engine.close()


def test_steps_that_fail_harm_nobody_else():
    texts = asked_alone(36, seed=5)
    device = SlowDevice(pages=400, vocab_size=VOCABULARY, delay=0.001, faults=12)
    engine = Engine(device, piece)
    num_texts, failed = 0, set[str]()
    while num_texts < 3 or not {"not launched", "not read"} <= failed:
        tally = stress(engine, texts, seconds=0.7, at_once=6, seed=5, faults=True)
        assert not tally.differing.total(), tally.differing
        num_texts, failed = num_texts + tally.texts.total(), failed | tally.failed.keys()
    engine.close()


def test_texts_with_penalties_run_ahead():
    device = SlowDevice(pages=200, vocab_size=VOCABULARY, delay=0)
    engine = Engine(device, piece)
    penalties = {"frequency_penalty": 0.8, "penalty_window": 5, "penalize_prompt": False}
    assert len(list(engine.submit(request([1, 2, 3], 40, settings=penalties)))) == 40
    assert device.has_placeholder >= 38, (
        "all but the first were launched before the one before was read"
    )
    engine.close()


def test_penalties_see_tokens_that_are_drafted_or_not_read_yet(monkeypatch: pytest.MonkeyPatch):
    logits = np.linspace(5, 0, VOCABULARY, dtype=np.float32)  # the penalties alone move the picks
    monkeypatch.setattr(null_model, "logits_after", lambda tokens, size: logits)
    penalties = {"temperature": 0, "frequency_penalty": 3.0, "penalty_window": 5}

    def write(overlaps: bool = False, drafter: Any = None) -> tuple[list[int], int]:
        engine = new_engine(pages=200, overlaps=overlaps)
        stream = engine.submit(request([1, 2, 3], 40, settings=penalties, drafter=drafter))
        tokens = [step.token for step in stream]
        engine.close()
        return tokens, stream.accepted

    alone, _ = write()
    assert len(set(alone)) > 2
    text = [1, 2, 3, *alone]
    drafted, accepted = write(drafter=Says(lambda tokens: text[len(tokens) : len(tokens) + 5]))
    assert drafted == alone
    assert accepted > 30, "every guess was right"
    assert write(overlaps=True)[0] == alone


def test_a_text_that_fails_while_all_run_ahead_harms_no_other(monkeypatch: pytest.MonkeyPatch):
    def broken_after_nine(tokens: Any, size: int) -> Any:
        logits = usual(tokens, size)
        return logits * np.nan if tokens[0] == 7 and len(tokens) == 12 else logits

    usual = null_model.logits_after
    monkeypatch.setattr(null_model, "logits_after", broken_after_nine)
    engine = Engine(SlowDevice(pages=200, vocab_size=VOCABULARY, delay=0), piece)
    requests = [request([first, 1, 2], 30, seed=first) for first in (6, 7, 8)]
    resume = pause_thread(engine)
    streams = [engine.submit(item) for item in requests]
    resume.set()
    with pytest.raises(BadLogitsError, match="NaN"):
        for number, step in enumerate(streams[1]):
            assert step.position == 3 + number
    assert number == 8, "the steps before the failure arrive"
    for stream, item in zip(streams[::2], requests[::2], strict=True):
        assert [step.token for step in stream] == expected(item, VOCABULARY)
    nothing_leaks(engine)
    engine.close()


def test_texts_that_run_ahead_keep_their_adapters():
    class Adapted(SlowDevice):
        def set_adapter(self, number: int, adapter: Any) -> None:
            pass

    device = Adapted(pages=200, vocab_size=VOCABULARY, delay=0)
    engine = Engine(device, piece)
    engine.adapters.load("poet", Adapter({}))
    resume = pause_thread(engine)
    names = [None, "poet", None, "poet"]
    streams = [
        engine.submit(request([number, 1], 30, adapter=name)) for number, name in enumerate(names)
    ]
    resume.set()
    assert all(len(list(stream)) == 30 for stream in streams)
    ahead = [batch for batch, _ in device.launches if (batch.tokens < 0).all()]
    assert len(ahead) == 29 == len(device.launches) - 1, "no step after the last token"
    assert {tuple(batch.adapters) for batch in ahead} == {(0, 1, 0, 1)}
    engine.close()


def test_texts_with_drafts_share_their_steps():
    """They cannot run ahead; in groups that take turns, each group would read all weights."""
    launching, arrived = threading.Event(), threading.Event()

    class Patient(SlowDevice):
        def launch(self, batch: Any) -> Any:
            launching.set()
            assert arrived.wait(60)
            return super().launch(batch)

    device = Patient(pages=400, vocab_size=VOCABULARY, delay=0.001)
    engine, streams = Engine(device, piece), []
    for number in range(4):
        drafter = garbage(number, VOCABULARY, longest=2)
        streams.append(engine.submit(request([number, 1, 2], 150, drafter=drafter)))
        assert launching.wait(60)  # the first step has only the first text
    arrived.set()
    texts = [[step.token for step in stream] for stream in streams]
    engine.close()
    assert texts == [expected(request([n, 1, 2], 150), VOCABULARY) for n in range(4)]
    rows = [len(batch.slots) for batch, _ in device.launches]
    assert rows.count(4) > len(rows) / 2, rows


def test_requests_are_taken_in_while_a_step_runs():
    """A request that arrives while the device is busy is planned with the next step, not after the
    result of the running one was read."""
    gate, computing = threading.Event(), threading.Event()

    class Gated(SlowDevice):
        def _compute(self, batch: Any) -> Any:
            computing.set()
            assert gate.wait(60)
            return super()._compute(batch)

    device = Gated(pages=200, vocab_size=VOCABULARY, delay=0)
    engine = Engine(device, piece)
    first = engine.submit(request([1, 2, 3], 5))
    assert computing.wait(60)
    second = engine.submit(request([4, 5, 6], 5))
    cancelled = engine.submit(request([7, 8, 9], 200))
    cancelled.close()
    gate.set()
    assert len(list(first)) == len(list(second)) == 5
    assert all(cancelled == 1 for _, cancelled in device.launches[1:5]), (
        "the device had nothing to do"
    )
    assert any(4 in batch.tokens for batch, _ in device.launches[1:5])
    engine.close()


def test_canvas_commands_leave_the_step_in_flight():
    """While a text is generated, canvas commands and passes never leave the device idle."""
    device = SlowDevice(pages=400, vocab_size=VOCABULARY, delay=0.002)
    engine = Engine(device, piece)
    text = engine.submit(request([1, 2, 3], 400))
    next(text)
    mask = VOCABULARY - 1
    kind = CanvasKind(mask_id=mask, sight="causal")
    with open_canvas(engine, [4, 5, 6, 7, 8], 4, kind) as canvas:
        canvas.set(0, 11)
        canvas.append(2)
        with canvas.fork() as other:
            snapshot = other.snapshot()
            other.set(0, 12)
            other.commit(1)
            other.restore(snapshot)
            tokens = [4, 5, 6, 7, 8, 11, *[mask] * 5]
            for some_canvas in (canvas, other):
                logits = some_canvas.logits()
                assert np.array_equal(logits[0], null_model.logits_after(tokens, VOCABULARY))
    assert not text.ended, "the text was to be generated meanwhile"
    assert any(mask in batch.tokens for batch, _ in device.launches)
    unread = [count for _, count in device.launches[1:]]
    assert set(unread) == {1}, "a command waited for the step in flight"
    text.close()
    engine.close()


def test_a_failed_step_of_a_cancelled_task_fails_the_next_task_of_its_branch():
    """A step's page copies and table updates are lost with it, also for a later task in flight."""
    device: Any = SlowDevice(pages=200, vocab_size=VOCABULARY, delay=0)
    engine = Engine(device, piece)
    branch = engine.open([1, 2, 3])
    launch, compute, second = device.launch, device._compute, _Computation(engine.loop, branch, 1)

    def replace_task() -> None:  # before the first step is settled
        task = engine.scheduler.task_of(branch)
        assert task is not None
        engine.loop.fail(task, WorkCancelledError("cancelled"))
        engine.tree.append(branch, [5])
        second.begin(engine.scheduler)

    def first_launch(batch: Any) -> Any:
        device.launch = launch
        engine.loop.post(replace_task, at_rest=False)
        return launch(batch)

    def first_compute(batch: Any) -> Any:
        device._compute = compute
        raise RuntimeError("the device failed")

    device.launch, device._compute = first_launch, first_compute
    with pytest.raises(WorkCancelledError, match="cancelled"):
        engine.extend(branch, [4])
    with pytest.raises(RuntimeError, match="the device failed"):
        engine.loop.wait_for(second.future)
    logits = engine.extend(branch, [6])
    assert np.array_equal(logits[0], null_model.logits_after([1, 2, 3, 4, 5, 6], VOCABULARY))
    engine.release(branch)
    engine.close()


def test_texts_that_the_chain_picks_for_do_not_hold_up_the_others(monkeypatch: Any):
    """Forty explained texts, each of which takes long to be picked for, beside a plain one."""
    device = SlowDevice(pages=2000, vocab_size=VOCABULARY, delay=0.001)
    engine = Engine(device, piece)
    usual, together = engine.loop._picker.pick, list[int]()

    def slow(ready: Any) -> Any:
        together.append(len(ready))
        time.sleep(0.002 * len(ready))
        return usual(ready)

    monkeypatch.setattr(engine.loop._picker, "pick", slow)
    explained = [engine.submit(request([n, 1], 30, limits={"explain": True})) for n in range(40)]
    for stream in explained:
        next(stream)
    plain = engine.submit(request([3, 2, 1], 30))
    assert len(list(plain)) == 30
    written = sum(30 - len(list(stream)) for stream in explained) / 40
    assert max(together) <= 16
    assert written < 25, "the plain text waited for each token of the others"
    engine.close()


def test_budgets_of_thoughts_close_them_where_steps_run_ahead():
    """Reasoning ends at its budget, also where the next step could be in flight; without a budget,
    what is reasoning is known."""
    marks = {"<think>": 5, "</think>": 6}
    format = ReasoningFormat(
        "<think>", "</think>", ids=marks, controls=marks, opening_ids=(5,), close_ids=(6,),
        after_close_ids=(7, 8),
    )  # fmt: skip

    def budget_of(seed: int) -> int | None:
        return None if seed % 5 == 4 else seed % 13

    def thinking(seed: int) -> Request:
        place = "inside" if seed % 3 else "before"
        return Request(
            prompt=(seed % 4, 9, 10),
            settings=SamplingSettings(temperature=1, seed=seed),
            limits=Limits(max_tokens=40, context=200, end_ids=frozenset()),
            thinking=ReasoningSpec(format, OutputStart(place), budget_of(seed)),  # type: ignore[arg-type]
        )

    plain = Engine(null_model.NullModel(pages=400, vocab_size=VOCABULARY), piece)
    device = SlowDevice(pages=400, vocab_size=VOCABULARY, delay=0.0005)
    ahead = Engine(device, piece)
    results = []
    for engine in (plain, ahead):
        streams = [engine.submit(thinking(seed)) for seed in range(30)]
        results.append([[(step.token, step.thought) for step in stream] for stream in streams])
        engine.close()
    assert results[0] == results[1] and device.has_placeholder > 100
    texts = list(enumerate(results[0]))
    closed = [text for seed, text in texts if seed % 3 and budget_of(seed) == 0]
    assert closed and all([token for token, _ in text[:3]] == [6, 7, 8] for text in closed)
    assert any(thought for seed, text in texts if budget_of(seed) is None for _, thought in text)
