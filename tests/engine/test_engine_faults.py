"""The engine's thread cannot die, no caller waits for ever, and everything is released."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
from typing import Any

import pytest

import unspool
from helpers import null_model
from unspool.conversation import Conversation
from unspool.decoding.branches import HeldBranches
from unspool.engine.canvas import CanvasKind, open_canvas
from unspool.engine.engine import Engine
from unspool.engine.request import Limits, Request
from unspool.engine.results import StepQueue, StepStream
from unspool.errors import SettingsError, UnspoolError
from unspool.model.adapters import Adapter
from unspool.sampling import SamplingSettings
from unspool.sampling.guards import GuardPolicy
from unspool.sampling.monitors import GuardError, PredicateGuard


def request(prompt: list[int], count: int = 20, **overrides: Any) -> Request:
    options = overrides.pop("settings", SamplingSettings(seed=1))
    limits = Limits(max_tokens=count, context=5000, **overrides.pop("limits", {}))
    return Request(prompt=tuple(prompt), settings=options, limits=limits, **overrides)


def new_engine(**shape: Any) -> Engine:
    return Engine(null_model.NullModel(**shape), lambda token: b"%d " % token)


def within(seconds: float, work: Any) -> Any:
    """What a call gives; an error, rather than a test that hangs, if it never comes back."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "it never came back"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def is_idle(engine: Engine) -> bool:
    deadline = time.monotonic() + 30
    while engine.call(lambda: len(engine.scheduler)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


# -- options are checked at the door ----------------------------------------------------------


@pytest.mark.parametrize("priority", ["x", float("nan"), 1.5, True])
def test_a_priority_that_is_no_number(tiny_lm: Any, priority: Any):
    with pytest.raises(SettingsError, match=r"priority must be an integer"):
        tiny_lm.generate([1, 2], max_tokens=2, priority=priority)
    created = tiny_lm.generate([1, 2], max_tokens=2, end=False)
    with pytest.raises(SettingsError, match="priority"):
        created.resume(priority=priority)
    assert len(within(60, lambda: tiny_lm.generate([1, 2], max_tokens=2, end=False)).tokens) == 2


def test_one_stop_string_is_one_stop_string_in_a_conversation(lm: Any):
    talk = Conversation(lm)
    generation, steps = talk.ask("Hi", max_tokens=1, stop="END")
    list(steps)
    assert generation.request.limits.stop[0] == "END"


# -- the loop continues -------------------------------------------------------------------------


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
                within(30, lambda: list(engine.submit(request([1, 2, 3], 9))))
        assert len(within(30, lambda: list(engine.submit(request([1, 2, 3], 9))))) == 9
    engine.call(engine.tree.index.clear)
    assert engine.tree.pool.used == 0


def test_a_command_that_raises_is_told_to_who_gave_it():
    engine = new_engine()
    running = engine.submit(request([1, 2], 200))
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 / 0)
    assert len(within(30, lambda: list(running))) == 200


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
        within(60, lambda: list(stream) and list(engine.submit(request([1, 2], 10))))
    with pytest.raises(UnspoolError, match=r"thread has ended|closed"):
        within(60, lambda: engine.open([1, 2]))
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


def test_a_drafter_a_listener_and_a_predicate_that_raise_harm_nobody():
    class Bad:
        def propose(self, tokens: Any, most: int) -> list[int]:
            raise RuntimeError("no idea")

        def learn(self, *_: Any) -> None: ...

    engine = new_engine()
    plain = [step.token for step in engine.submit(request([1, 2], 20))]
    drafted = engine.submit(request([1, 2], 20, drafter=Bad()))
    reader = engine.submit(request([1, 2], 20))

    def listener() -> None:
        raise RuntimeError("Event loop is closed")

    reader._queue.listeners.append(listener)
    assert [step.token for step in within(30, lambda: list(drafted))] == plain
    assert [step.token for step in within(30, lambda: list(reader))] == plain
    assert "drafting stopped" in drafted.notes[0]


def test_two_callers_cannot_compute_one_branch_at_once():
    engine = new_engine()
    branch = engine.open([1, 2, 3])
    gate, errors = threading.Event(), list[str]()
    engine.loop.post(lambda: gate.wait(30))

    def extend() -> None:
        try:
            engine.extend(branch, [4])
        except UnspoolError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=extend) for _ in range(2)]
    for thread in threads:
        thread.start()
    while len(engine.loop._commands) < 2:
        time.sleep(0.001)
    gate.set()
    for thread in threads:
        thread.join(30)
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
    created: list[Any] = []
    usual, gate = lm.model.backend, threading.Barrier(8)

    def slow(**options: Any) -> Any:
        time.sleep(0.05)
        return usual(**options)

    lm.model.backend = slow

    def first() -> None:
        gate.wait()
        created.append(lm.engine)

    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, created))) == 1


# -- leaving is cancelling --------------------------------------------------------------------


async def _leave_early(stream: StepStream) -> None:
    async for _ in stream:
        break


@pytest.mark.parametrize("way", ["break", "with", "close", "error", "interrupt", "async"])
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
    else:
        error = {"error": ZeroDivisionError, "interrupt": KeyboardInterrupt}.get(way)
        with contextlib.suppress(ZeroDivisionError, KeyboardInterrupt):
            for _ in stream:
                if error:
                    raise error
                break
    assert is_idle(engine), "the text was written on"
    assert engine.steps < 3900
    assert len(within(30, lambda: list(engine.submit(request([1, 2], 5))))) == 5


def test_letting_go_of_a_stream_cancels():
    engine = new_engine(pages=2000, context=5000)
    stream = engine.submit(request([1, 2], 4000))
    next(stream)
    del stream
    gc.collect()
    assert is_idle(engine) and engine.steps < 3900


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
        within(60, lambda: tiny_lm.generate([1, 2], max_tokens=4, end=False, guard=guard))
    assert len(within(60, lambda: tiny_lm.generate([1, 2], max_tokens=2, end=False)).tokens) == 2


def test_a_stage_and_a_drafter_that_call_their_own_model_harm_nobody(tiny_lm: Any):
    def stage(tokens: Any, logits: Any) -> Any:
        return tiny_lm.score(tokens.tolist())

    with pytest.raises(UnspoolError, match="cannot wait for the same model"):
        within(60, lambda: tiny_lm.generate([1, 2], max_tokens=4, stages=[stage, ...]))

    class Drafter:
        def propose(self, tokens: Any, most: int) -> Any:
            return tiny_lm.generate(list(tokens), max_tokens=most).tokens

        def learn(self, proposed: int, accepted: int, seconds: float) -> None:
            return None

    options = {"temperature": 0, "max_tokens": 4, "end": False}
    plain = within(60, lambda: tiny_lm.generate([1, 2], **options))
    text = within(60, lambda: tiny_lm.generate([1, 2], speculate=Drafter(), **options))
    assert text.tokens == plain.tokens
    assert any("cannot wait for the same model" in note for note in text.notes)


def test_reading_a_stream_on_the_thread_that_writes_it():
    engine = new_engine(pages=2000, context=5000)
    stream = engine.submit(request([3], 4000))
    guard = GuardPolicy((PredicateGuard(lambda text, tokens: len(list(stream))),))
    with pytest.raises(GuardError, match="cannot wait"):
        within(30, lambda: list(engine.submit(request([1], 400, guards=guard))))
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
    assert len(within(30, lambda: list(engine.submit(request([9], 4, guards=guard))))) == 4

    def pages_used() -> int:
        engine.tree.index.clear()
        return engine.tree.pool.used

    assert engine.call(pages_used) == 0
    engine.close()


def test_a_closed_event_loop_does_not_reach_the_engine(tiny_lm: Any):
    async def leave() -> None:
        async for _ in tiny_lm.stream([1, 2, 3], max_tokens=90, end=False):
            break

    for _ in range(3):
        asyncio.run(leave())
    assert len(within(60, lambda: tiny_lm.generate([1, 2], max_tokens=3, end=False)).tokens) == 3


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
    assert within(30, lambda: asyncio.run(read())) == [step, step, "it broke"]


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


# -- memory -----------------------------------------------------------------------------------


def test_a_preempted_text_finds_its_pages_again():
    """Preempted in the very step in which it would have run, and no more than that is lost."""
    engine = new_engine(pages=40, context=400)
    backend: Any = engine.backend
    first = engine.submit(request(list(range(20)), 60))
    second = engine.submit(request([7] * 40, 60))
    assert len(within(60, lambda: list(first))) == 60
    assert len(within(60, lambda: list(second))) == 60
    preempted = engine.scheduler.preemptions
    assert preempted > 0, "the memory was meant to be too small"
    read = sum(sum(run) for run in backend.runs)
    assert read < 180 + preempted * 50, "what was still stored was not computed again"


def test_nobody_is_let_in_only_to_be_preempted():
    """Twelve texts in memory for three: each is preempted a few times at the most."""
    engine = new_engine(pages=60, context=400)
    streams = [engine.submit(request([n] * 10, 60)) for n in range(12)]
    assert all(len(within(120, lambda s=s: list(s))) == 60 for s in streams)
    assert engine.scheduler.preemptions <= 24


@pytest.mark.parametrize("pages", [400, 60])
def test_steps_that_overlap_give_the_same_texts(pages: int):
    """A device that is asked for a step only after the next one was launched."""
    submitted = [
        request([n, n + 1, n + 2], 10 + n, settings=SamplingSettings(seed=n, temperature=1.0))
        for n in range(14)
    ]
    submitted.append(request([3, 4], 20, limits={"end_ids": frozenset(range(8))}))
    submitted.append(request([3, 5], 20, settings=SamplingSettings(frequency_penalty=0.5, seed=3)))
    submitted.append(request([3, 6], 20, limits={"explain": True}))
    texts = []
    for overlaps in (False, True):
        engine = new_engine(pages=pages, overlaps=overlaps)
        streams = [engine.submit(item) for item in submitted]
        texts.append([[step.token for step in within(60, lambda s=s: list(s))] for s in streams])
        backend: Any = engine.backend
        assert (backend.has_placeholder > 20) == overlaps
        assert is_idle(engine)
        engine.call(engine.tree.index.clear)
        assert engine.tree.pool.used == 0
    assert texts[0] == texts[1]


def test_cancelling_while_steps_overlap():
    engine = new_engine(pages=400, overlaps=True, context=3000)
    for seed in range(30):
        stream = engine.submit(request([1, 2, seed % 40], 500))
        other = engine.submit(request([5, seed % 40], 12))
        for _ in range(seed % 4):
            next(stream)
        stream.close()
        assert len(within(30, lambda other=other: list(other))) == 12
    assert is_idle(engine)
    engine.call(engine.tree.index.clear)
    assert engine.tree.pool.used == 0


# -- what is acquired is released --------------------------------------------------------------


def pages_in_use(engine: Engine) -> int:
    """Pages that stay used when everything that no branch needs is evicted."""

    def count() -> int:
        engine.tree.index.clear()
        return engine.tree.pool.used

    return engine.call(count)


def test_a_text_that_fails_while_it_is_set_up_keeps_no_branch(monkeypatch: pytest.MonkeyPatch):
    engine = new_engine()
    list(engine.submit(request([1, 2, 3, 4, 5, 6], 4)))

    def broken(settings: Any) -> bool:
        raise RuntimeError("no such setting")

    with monkeypatch.context() as patch:
        patch.setattr("unspool.engine.sequence.needs_history", broken)
        with pytest.raises(RuntimeError, match="no such setting"):
            within(30, lambda: list(engine.submit(request([1, 2, 3, 4, 5, 6], 4))))
    assert pages_in_use(engine) == 0
    engine.close()


def test_a_drafter_whose_properties_fail_only_stops_drafting():
    class Shy:
        looks = 0

        @property
        def reads(self) -> tuple[int, ...]:
            self.looks += 1
            if self.looks > 1:
                raise RuntimeError("no more")
            return (1,)

        def needs(self, tokens: Any) -> int:
            return 0

        def see(self, first: int, vectors: Any) -> None: ...

        def propose(self, tokens: Any, most: int) -> list[int]:
            return []

        def learn(self, *_: Any) -> None: ...

    engine = new_engine()
    plain = [step.token for step in engine.submit(request([1, 2], 6))]
    stream = engine.submit(request([1, 2], 6, drafter=Shy()))
    assert [step.token for step in within(30, lambda: list(stream))] == plain
    assert any("no more" in note for note in stream.notes)
    assert pages_in_use(engine) == 0
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
