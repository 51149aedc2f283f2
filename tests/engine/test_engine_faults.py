"""Bad callers, full memory, failing models: no caller waits for ever, everything is released."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import unspool
from helpers import null_model
from helpers.drafts_support import Says
from helpers.engine_support import expected, new_engine, nothing_leaks, pause_thread, request
from unspool.conversation import Conversation
from unspool.decoding.branches import HeldBranches
from unspool.engine.canvas import CanvasKind, open_canvas
from unspool.engine.engine import Engine
from unspool.engine.results import StepQueue, StepStream
from unspool.errors import ContextError, SettingsError, UnspoolError
from unspool.model.adapters import Adapter
from unspool.sampling.guards import GuardPolicy
from unspool.sampling.monitors import GuardError, PredicateGuard


def is_idle(engine: Engine) -> bool:
    deadline = time.monotonic() + 30
    while engine.call(lambda: len(engine.scheduler)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


@pytest.mark.parametrize("priority", ["x", float("nan"), True])
def test_a_priority_that_is_no_number(tiny_lm: Any, priority: Any):
    with pytest.raises(SettingsError, match=r"priority must be an integer"):
        tiny_lm.generate([1, 2], max_tokens=2, priority=priority)
    created = tiny_lm.generate([1, 2], max_tokens=2, end=False)
    with pytest.raises(SettingsError, match="priority"):
        created.resume(priority=priority)
    assert len(tiny_lm.generate([1, 2], max_tokens=2, end=False).tokens) == 2


def test_one_stop_string_is_one_stop_string_in_a_conversation(lm: Any):
    talk = Conversation(lm)
    generation, steps = talk.ask("Hi", max_tokens=1, stop="END")
    list(steps)
    assert generation.request.limits.stop[0] == "END"


def test_an_error_anywhere_in_the_loop_fails_who_is_in_flight_and_nobody_later(
    monkeypatch: pytest.MonkeyPatch,
):
    engine = new_engine()
    for owner, name in [
        (engine.scheduler, "plan"),
        (engine.tree, "reserve"),
        (engine.tree, "advance"),
        (engine.tree, "slot_of"),
        (engine.backend, "launch"),
    ]:
        with monkeypatch.context() as patched:

            def broken(*_: Any, **__: Any) -> Any:
                raise RuntimeError(f"broken {name}")  # noqa: B023

            patched.setattr(owner, name, broken)
            with pytest.raises(RuntimeError, match=f"broken {name}"):
                list(engine.submit(request([1, 2, 3], 9)))
        assert len(list(engine.submit(request([1, 2, 3], 9)))) == 9
    nothing_leaks(engine)


def test_a_command_that_raises_is_told_to_who_gave_it():
    engine = new_engine()
    running = engine.submit(request([1, 2], 200))
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 / 0)
    assert len(list(running)) == 200


def test_commands_that_keep_arriving_do_not_stop_a_text():
    """Each command gives the next one, so that there is always one waiting."""
    engine, done, count = new_engine(), threading.Event(), 0

    def command() -> None:
        nonlocal count
        count += 1
        if not done.is_set():
            engine.loop.post(command, at_rest=False)

    command()
    try:
        steps = [step.token for step in engine.submit(request([1, 2, 3], count=5))]
    finally:
        done.set()
    assert steps == expected(request([1, 2, 3], count=5))
    assert count > 5


def test_a_thread_that_is_gone_is_an_error_and_never_a_wait(monkeypatch: pytest.MonkeyPatch):
    engine = new_engine()
    engine.call(lambda: None)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def dies() -> None:
        raise SystemExit

    monkeypatch.setattr(engine.loop, "fail_all", lambda error: dies())
    stream = engine.submit(request([1, 2], 10))
    engine.loop.post(dies)
    with pytest.raises(UnspoolError, match=r"thread has ended|closed"):
        list(stream) and list(engine.submit(request([1, 2], 10)))
    with pytest.raises(UnspoolError, match=r"thread has ended|closed"):
        engine.open([1, 2])
    assert not engine.loop.alive


def test_an_engine_whose_thread_is_just_starting_is_alive(monkeypatch: pytest.MonkeyPatch):
    """On a busy machine a caller may check between the creation of the thread and its start."""
    engine = new_engine()
    starts, submitted = threading.Thread.start, list[bool]()

    def start(thread: threading.Thread) -> None:
        if thread.name == "unspool-engine":
            submitted.append(engine.loop.alive)
        starts(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert len(list(engine.submit(request([1, 2], 5)))) == 5
    assert submitted == [True]


def test_two_callers_cannot_compute_one_branch_at_once():
    engine = new_engine()
    branch = engine.open([1, 2, 3])
    gate = pause_thread(engine)
    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(engine.extend, branch, [4]) for _ in range(2)]
        while len(engine.loop._commands) < 2:
            time.sleep(0.001)
        gate.set()
        errors = [str(job.exception(30)) for job in jobs if job.exception(30)]
    assert len(errors) == 1 and "computed for another caller" in errors[0]
    assert branch.tokens == [1, 2, 3, 4], "the one that was refused changed nothing"
    with pytest.raises(UnspoolError, match="given twice"):
        engine.extend_all([(branch, [5]), (branch, [6])])
    assert branch.tokens == [1, 2, 3, 4]
    engine.release(branch)
    with pytest.raises(UnspoolError, match="released"):
        engine.extend(branch, [5])


def test_eight_first_callers_make_one_engine(tmp_path: Any):
    from helpers import tiny

    tiny.save("llama", tmp_path)
    lm = unspool.load(tmp_path, backend="torch", memory=8 << 20)
    usual, gate = lm.model.backend, threading.Barrier(8)

    def slow(**options: Any) -> Any:
        time.sleep(0.05)
        return usual(**options)

    def first(_: int) -> int:
        gate.wait()
        return id(lm.engine)

    lm.model.backend = slow
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(first, range(8)))) == 1


async def _leave_early(stream: StepStream) -> None:
    async for _ in stream:
        break


@pytest.mark.parametrize(
    "way", ["break", "with", "close", "garbage", "error", "interrupt", "async"]
)
def test_leaving_cancels(way: str):
    engine = new_engine(pages=2000, context=5000)
    stream = engine.submit(request([1, 2], 4000))
    if way == "async":
        asyncio.run(_leave_early(stream))
    elif way == "with":
        with stream:
            next(stream)
    elif way == "close":
        next(stream)
        stream.close()
    elif way == "garbage":
        next(stream)
        del stream
        gc.collect()
    else:
        error = {"error": ZeroDivisionError, "interrupt": KeyboardInterrupt}.get(way)
        with contextlib.suppress(ZeroDivisionError, KeyboardInterrupt):
            for _ in stream:
                if error:
                    raise error
                break
    assert is_idle(engine), "the text was written on"
    assert engine.steps < 3900
    assert len(list(engine.submit(request([1, 2], 5)))) == 5


CALLS: dict[str, Any] = {
    "generate": lambda lm: lm.generate([1, 2], max_tokens=2),
    "stream": lambda lm: list(lm.stream([1, 2], max_tokens=2)),
    "score": lambda lm: lm.score([1, 2, 3]),
    "samples": lambda lm: lm.samples([1, 2], n=2, max_tokens=2),
    "branch": lambda lm: lm.engine.open([1, 2]),
    "canvas": lambda lm: open_canvas(lm.engine, [1, 2], 2, CanvasKind(mask_id=0)),
    "asynchronous": lambda lm: asyncio.run(lm.stream([1, 2], max_tokens=2).__aiter__().__anext__()),
    "close": lambda lm: lm.close(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_predicate_that_calls_its_own_model_fails_alone(tiny_lm: Any, call: Any):
    """It would wait for itself for ever, and everybody with it."""
    guard = GuardPolicy((PredicateGuard(lambda text, tokens: call(tiny_lm)),))
    with pytest.raises(GuardError, match="cannot wait for the same model"):
        tiny_lm.generate([1, 2], max_tokens=4, end=False, guard=guard)
    assert len(tiny_lm.generate([1, 2], max_tokens=2, end=False).tokens) == 2


def test_a_stage_and_a_drafter_that_call_their_own_model_harm_nobody(tiny_lm: Any):
    def stage(tokens: Any, logits: Any) -> Any:
        return tiny_lm.score(tokens.tolist())

    with pytest.raises(UnspoolError, match="cannot wait for the same model"):
        tiny_lm.generate([1, 2], max_tokens=4, stages=[stage, ...])

    class Drafter:
        def propose(self, tokens: Any, most: int) -> Any:
            return tiny_lm.generate(list(tokens), max_tokens=most).tokens

        def learn(self, proposed: int, accepted: int, seconds: float) -> None:
            return None

    options = {"temperature": 0, "max_tokens": 4, "end": False}
    plain = tiny_lm.generate([1, 2], **options)
    text = tiny_lm.generate([1, 2], speculate=Drafter(), **options)
    assert text.tokens == plain.tokens
    assert any("cannot wait for the same model" in note for note in text.notes)


def test_reading_a_stream_on_the_thread_that_writes_it():
    engine = new_engine(pages=2000, context=5000)
    stream = engine.submit(request([3], 4000))
    guard = GuardPolicy((PredicateGuard(lambda text, tokens: len(list(stream))),))
    with pytest.raises(GuardError, match="cannot wait"):
        list(engine.submit(request([1], 400, guards=guard)))
    assert is_idle(engine)
    engine.close()


def test_what_the_garbage_collector_ends_on_the_engines_thread_is_released():
    """A generator collected on the engine's thread releases its branches without waiting."""
    engine = new_engine()

    def strategy() -> Any:
        with HeldBranches(engine) as branches:
            engine.extend(branches.open([1, 2, 3, 4, 5]))
            yield

    running = [strategy()]
    next(running[0])
    guard = GuardPolicy((PredicateGuard(lambda text, tokens: running.clear()),))
    assert len(list(engine.submit(request([9], 4, guards=guard)))) == 4
    nothing_leaks(engine)
    engine.close()


def test_an_asynchronous_reader_gets_an_error_that_comes_right_behind_a_step(tiny_lm: Any):
    step = tiny_lm.generate([1, 2], max_tokens=1, end=False).steps[0]
    queue = StepQueue()

    async def read() -> list[Any]:
        results: list[Any] = []
        try:
            async for item in StepStream(queue):
                results.append(item)
                if len(results) == 1:  # both come while it is busy with the first
                    queue.add(step)
                    queue.end(UnspoolError("it broke"))
        except UnspoolError as error:
            results.append(str(error))
        return results

    queue.add(step)
    assert asyncio.run(read()) == [step, step, "it broke"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_stream_in_a_forked_child_is_an_error():
    engine = new_engine(pages=2000, context=5000)
    stream = engine.submit(request([1, 2], 4000))
    next(stream)
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(30)
            while True:
                next(stream)
        except UnspoolError as error:
            os._exit(7 if "forked" in str(error) else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    stream.close()


def test_a_preempted_text_finds_its_pages_again():
    """Preempted in the very step in which it would have run, and no more than that is lost."""
    engine = new_engine(pages=40, context=400)
    backend: Any = engine.backend
    first = engine.submit(request(list(range(20)), 60))
    second = engine.submit(request([7] * 40, 60))
    assert len(list(first)) == 60
    assert len(list(second)) == 60
    preempted = engine.scheduler.preemptions
    assert preempted > 0, "the memory was meant to be too small"
    read = sum(sum(run) for run in backend.runs)
    assert read < 180 + preempted * 50, "what was still stored was not computed again"


def test_nobody_is_let_in_only_to_be_preempted():
    """Twelve texts in memory for three: each is preempted a few times at the most."""
    engine = new_engine(pages=60, context=400)
    streams = [engine.submit(request([n] * 10, 60)) for n in range(12)]
    assert all(len(list(s)) == 60 for s in streams)
    assert engine.scheduler.preemptions <= 24


def test_a_text_that_fails_while_it_is_set_up_keeps_no_branch(monkeypatch: pytest.MonkeyPatch):
    engine = new_engine()
    list(engine.submit(request([1, 2, 3, 4, 5, 6], 4)))

    def broken(settings: Any) -> bool:
        raise RuntimeError("no such setting")

    with monkeypatch.context() as patch:
        patch.setattr("unspool.engine.sequence.needs_history", broken)
        with pytest.raises(RuntimeError, match="no such setting"):
            list(engine.submit(request([1, 2, 3, 4, 5, 6], 4)))
    nothing_leaks(engine)
    engine.close()


def test_a_drafter_whose_properties_fail_only_stops_drafting():
    class Shy(Says):
        num_reads = 0

        @property
        def reads(self) -> tuple[int, ...]:
            self.num_reads += 1
            if self.num_reads > 1:
                raise RuntimeError("no more")
            return (1,)

        def needs(self, tokens: Any) -> int:
            return 0

        def see(self, first: int, vectors: Any) -> None: ...

    engine = new_engine()
    plain = [step.token for step in engine.submit(request([1, 2], 6))]
    stream = engine.submit(request([1, 2], 6, drafter=Shy(lambda tokens: [])))
    assert [step.token for step in stream] == plain
    assert any("no more" in note for note in stream.notes)
    nothing_leaks(engine)
    engine.close()


def test_a_listener_that_leaves_while_it_is_called_and_fails_harms_nobody():
    queue = StepQueue()

    def listener() -> None:
        queue.listeners.remove(listener)
        raise RuntimeError("Event loop is closed")

    queue.listeners.append(listener)
    queue.end()
    assert queue.ended and not queue.listeners


def test_a_retired_adapter_is_freed_when_its_last_text_ends():
    class Adapting(null_model.NullModel):
        def __init__(self) -> None:
            super().__init__(pages=2000, context=5000)
            self.adapters: set[int] = set()

        def set_adapter(self, number: int, adapter: Any) -> None:
            (self.adapters.discard if adapter is None else self.adapters.add)(number)

    backend = Adapting()
    engine = Engine(backend, lambda token: b"x")
    engine.adapters.load("poet", Adapter({}))
    stream = engine.submit(request([1, 2], 4000, adapter="poet"))
    next(stream)
    engine.adapters.unload("poet")
    assert backend.adapters == {1}, "a text is being written with it"
    stream.close()
    assert is_idle(engine)
    assert engine.call(lambda: set(backend.adapters)) == set()
    engine.close()


def test_cancelling_frees_the_pages_at_once():
    engine = new_engine(pages=1200, context=5000)
    stream = engine.submit(request([5] * 3000, count=500))
    deadline = time.monotonic() + 10
    while not engine.steps and time.monotonic() < deadline:
        time.sleep(0.001)
    stream.close()  # most likely in the middle of its prompt
    assert len(list(stream)) < 400
    nothing_leaks(engine)
    with engine.submit(request([1], count=500)) as leaving:
        next(leaving)
    list(leaving)
    nothing_leaks(engine)


def test_what_can_never_fit_is_refused_at_once():
    engine = new_engine(pages=5)
    with pytest.raises(UnspoolError, match=r"30 tokens does not fit .* holds 20"):
        engine.submit(request([1] * 10, count=20))
    with pytest.raises(ContextError, match=r"600 tokens .* holds 512"):
        engine.open([1] * 600)
    with pytest.raises(UnspoolError, match="at least one token"):
        engine.open([])


def test_memory_held_by_open_branches_is_a_clear_error():
    engine = Engine(null_model.NullModel(pages=5))
    keeper = engine.open([1] * 14)
    engine.extend(keeper)
    other = engine.open([2] * 12)
    with pytest.raises(UnspoolError, match="held by open branches"):
        engine.extend(other)
    engine.release(keeper)
    assert engine.extend(other).shape == (1, 40)


def test_the_queue_is_bounded():
    engine = new_engine(pages=3)
    engine.max_waiting = 2
    blocker = pause_thread(engine)
    streams = [engine.submit(request([1, 2], count=2)) for _ in range(2)]
    with pytest.raises(UnspoolError, match="2 requests are waiting"):
        engine.submit(request([1, 2], count=2))
    blocker.set()
    assert [len(list(stream)) for stream in streams] == [2, 2]
    assert len(list(engine.submit(request([1, 2], count=2)))) == 2


def test_a_row_without_candidates_fails_alone():
    engine = new_engine()
    everything = dict.fromkeys(range(40), -np.inf)
    impossible = request([1, 2], 5, settings={"logit_bias": everything})
    submitted = request([3, 4])
    bad, good = engine.submit(impossible), engine.submit(submitted)
    with pytest.raises(UnspoolError, match="no candidate token is left"):
        list(bad)
    assert [step.token for step in good] == expected(submitted)
    nothing_leaks(engine)


def test_a_model_that_nobody_uses_any_more_goes_with_its_engine(tmp_path: Any):
    from helpers import tiny

    tiny.save("llama", tmp_path)
    lm = unspool.load(tmp_path, backend="torch", memory=8 << 20)
    lm.generate([5, 6, 7], max_tokens=3)
    thread, reference = lm.engine.loop._thread, weakref.ref(lm)
    del lm
    gc.collect()
    assert reference() is None
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()


def test_a_closed_engine_says_so():
    engine = new_engine()
    stream = engine.submit(request([1], count=200))
    next(stream)
    engine.close()
    with pytest.raises(UnspoolError, match="closed"):
        list(stream)
    with pytest.raises(UnspoolError, match="closed"):
        engine.open([1])
