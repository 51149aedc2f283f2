"""Full memory, bad callers and failing models; and all of it together, at random."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

import unspool
from helpers import null_model
from helpers.engine_support import expected, new_engine, nothing_leaks, request, some_prompts
from unspool.engine.engine import Engine
from unspool.engine.request import Limits, Request
from unspool.errors import ContextError, UnspoolError
from unspool.sampling import SamplingSettings

# -- trouble ----------------------------------------------------------------------------------


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
    blocker = threading.Event()
    engine.loop.post(lambda: blocker.wait(10) and None)
    streams = [engine.submit(request([1, 2], count=2)) for _ in range(2)]
    with pytest.raises(UnspoolError, match="2 requests are waiting"):
        engine.submit(request([1, 2], count=2))
    blocker.set()
    assert [len(list(stream)) for stream in streams] == [2, 2]
    assert len(list(engine.submit(request([1, 2], count=2)))) == 2


def test_a_failing_backend_fails_its_batch_and_not_the_engine():
    engine = new_engine()
    backend: Any = engine.backend
    backend.fail_next = True
    with pytest.raises(RuntimeError, match="device is gone"):
        list(engine.submit(request([1, 2])))
    submitted = request([1, 2])
    assert [step.token for step in engine.submit(submitted)] == expected(submitted)
    nothing_leaks(engine)


def test_a_row_without_candidates_fails_alone():
    engine = new_engine()
    everything = dict.fromkeys(range(40), -np.inf)
    impossible = Request(
        prompt=(1, 2),
        settings=SamplingSettings(logit_bias=everything),
        limits=Limits(max_tokens=5, context=512),
    )
    submitted = request([3, 4])
    bad, good = engine.submit(impossible), engine.submit(submitted)
    with pytest.raises(UnspoolError, match="no candidate token is left"):
        list(bad)
    assert [step.token for step in good] == expected(submitted)
    nothing_leaks(engine)


def test_a_model_that_nobody_uses_any_more_goes_with_its_engine(tmp_path: Any):
    import gc
    import weakref

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


def stress(seconds: float, seed: int) -> None:
    """Submit, cancel, fork, rewind, forget, at random, and check every text that is finished."""
    chance = random.Random(seed)
    engine = new_engine(pages=90)
    running: list[tuple[Request, Any]] = []
    branches: list[Any] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        move = chance.random()
        if move < 0.5:
            prompt = some_prompts(1, chance.randrange(50))[0]
            submitted = request(prompt, chance.randrange(99), chance.randint(1, 40))
            running.append((submitted, engine.submit(submitted)))
        elif move < 0.6 and running:
            running.pop(chance.randrange(len(running)))[1].close()
        elif move < 0.7 and len(branches) < 3:
            branches.append(engine.open(some_prompts(1, chance.randrange(50))[0]))
        elif move < 0.8 and branches:
            branch = chance.choice(branches)
            logits = engine.extend(branch, [chance.randrange(40)])
            assert np.array_equal(logits[0], null_model.logits_after(branch.tokens, 40))
            engine.rewind(branch, chance.randint(1, len(branch.tokens)))
        elif move < 0.85 and branches:
            engine.release(branches.pop())
        elif move < 0.87:
            engine.call(lambda: engine.tree.index.evict(10))
        while len(running) > 24:
            submitted, stream = running.pop(0)
            assert [step.token for step in stream] == expected(submitted)
    for branch in branches:
        engine.release(branch)
    for submitted, stream in running:
        assert [step.token for step in stream] == expected(submitted)
    nothing_leaks(engine)
    engine.close()


def test_stress():
    stress(seconds=2, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stress_for_ten_minutes():
    stress(seconds=600, seed=2)
