"""The guarantees of the engine, and many concurrent texts."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unspool
from helpers.engine_support import (
    expected,
    new_engine,
    nothing_leaks,
    pause_thread,
    request,
    some_prompts,
)
from unspool.backends.step import StepLimits
from unspool.backends.torch.backend import TorchBackend
from unspool.engine.engine import Engine
from unspool.engine.reference import write
from unspool.engine.request import Request


@pytest.mark.parametrize("pages", [400, 30], ids=["roomy", "tight"])
def test_same_text_alone_and_among_others(pages: int):
    """Also with so little memory that texts are put aside and computed again."""
    engine = new_engine(pages=pages)
    submitted = [request(p, seed=s, count=5 + s) for s, p in enumerate(some_prompts(32))]
    streams = [engine.submit(r) for r in submitted]
    results = [[step.token for step in stream] for stream in streams]
    assert results == [expected(r) for r in submitted]
    if pages == 30:
        assert engine.scheduler.preemptions > 0, "the memory was meant to be too small"
    nothing_leaks(engine)


def test_same_text_from_a_cached_prefix_and_after_forgetting():
    engine = new_engine()
    submitted = request(list(range(20)), count=30)
    first = [step.token for step in engine.submit(submitted)]
    again = engine.submit(submitted)
    assert [step.token for step in again] == first == expected(submitted)
    assert again.prompt_reused == 19
    engine.call(engine.tree.index.clear)
    third = engine.submit(submitted)
    assert [step.token for step in third] == first
    assert third.prompt_reused == 0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_any_mix_of_requests_and_cancellations(seed: int):
    chance = random.Random(seed)
    engine = new_engine(pages=chance.choice([24, 60, 300]))
    running = []
    for number, prompt in enumerate(some_prompts(chance.randint(3, 20), seed)):
        submitted = request(
            prompt, seed=number, count=chance.randint(0, 25), priority=chance.randint(0, 2)
        )
        running.append((submitted, engine.submit(submitted)))
    for submitted, stream in running:
        if chance.random() < 0.3:
            for _ in range(chance.randint(0, 3)):
                next(stream, None)
            stream.close()
            list(stream)
        else:
            assert [step.token for step in stream] == expected(submitted)
    nothing_leaks(engine)
    engine.close()


def test_same_text_with_a_vocabulary(lm: Any):
    """Alone by the plain loop, alone by the engine, among 31 others, from a cached prefix."""
    from helpers.single_sequence import SingleSequence

    prompts = ["Once upon a time", "Why do leaves change color", "def add(a, b):", "The moon"]
    submitted = [
        lm.begin(f"{prompts[n % 4]}{' and' * (n // 8)}", max_tokens=10 + n % 3, seed=n,
                 temperature=0.9, top=0, explain=False, end=False)
        for n in range(32)
    ]  # fmt: skip
    together = []
    for generation, steps in submitted:
        list(generation.extend(steps))
        together.append(generation)
    for generation in together[::5]:
        request = generation.request
        text = SingleSequence(lm.model, 64)
        plain = write(text, request.prompt, request.settings, request.limits, lambda token: b"")
        assert [step.token for step in plain] == generation.tokens
        assert generation.rewind(4).resume().tokens == generation.tokens


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt2", "gpt-neox", "qwen3-moe"])
def test_cached_logits_are_those_of_a_fresh_run(family: str, tmp_path: Any):
    from helpers import tiny

    tiny.save(family, tmp_path)
    lm = unspool.load(tmp_path, backend="torch")
    engine = Engine(TorchBackend(lm.transformer, page_count=60))
    chance = random.Random(7)
    branches = [engine.open([chance.randrange(3, 250) for _ in range(20)])]
    for _ in range(25):
        branch = chance.choice(branches)
        move = chance.choice(["fork", "rewind", "extend", "extend", "drop"])
        if move == "fork" and len(branches) < 6:
            branches.append(engine.fork(branch))
        elif move == "rewind" and len(branch.tokens) > 2:
            engine.rewind(branch, chance.randint(1, len(branch.tokens) - 1))
        elif move == "drop" and len(branches) > 1:
            engine.release(branch)
            branches.remove(branch)
        else:
            new = [chance.randrange(3, 250) for _ in range(chance.randint(1, 9))]
            new = new[: 100 - len(branch.tokens)]
            logits = engine.extend(branch, new, num_logits=max(1, len(new)))
            with torch.no_grad():
                fresh = lm.transformer(torch.tensor([branch.tokens]))[0, -max(1, len(new)) :]
            assert np.abs(logits - fresh.numpy()).max() < 1e-4
    for branch in branches:
        engine.release(branch)
    nothing_leaks(engine)


def test_the_verbs_of_a_branch(tiny_lm: Any):
    trunk = tiny_lm.engine.open([5, 6, 7, 8])
    logits = trunk.append()
    other = trunk.fork()
    other.append([9, 10])
    assert (trunk.tokens, other.tokens) == ([5, 6, 7, 8], [5, 6, 7, 8, 9, 10])
    other.rewind(4)
    np.testing.assert_allclose(other.append(), logits, atol=1e-5)
    trunk.release()
    other.release()


def test_a_long_prompt_does_not_freeze_the_others():
    engine = new_engine(pages=1200, context=5000)
    backend: Any = engine.backend
    all_submitted = pause_thread(engine)  # so that neither is done before
    short = engine.submit(request([1, 2, 3], count=60))
    long = engine.submit(request([5] * 4000, count=2))
    all_submitted.set()
    list(short)
    mixed = [run for run in backend.runs if max(run) > 1 and 1 in run]
    assert len(mixed) > 5, "chunks of the prompt ran beside next tokens"
    assert max(sum(run) for run in backend.runs) <= backend.limits.prefill_tokens
    long.close()


def test_the_backend_says_how_much_it_takes_in_a_step():
    limits = StepLimits(max_rows=3, prefill_tokens=40, prefill_beside_decode=20)
    engine = new_engine(pages=400, limits=limits)
    backend: Any = engine.backend
    all_submitted = pause_thread(engine)
    streams = [engine.submit(request([n] * 50, count=12)) for n in range(7)]
    all_submitted.set()
    assert all(len(list(stream)) == 12 for stream in streams)
    assert max(map(len, backend.runs)) == 3
    assert max(map(sum, backend.runs)) == 40
    beside = [sum(count for count in run if count > 1) for run in backend.runs if 1 in run]
    assert 10 < max(beside) <= 20


def test_a_prompt_alone_is_split_less_often():
    limits = StepLimits(prefill_tokens=40, prefill_beside_decode=20, prefill_alone=70)
    engine = new_engine(pages=400, limits=limits)
    backend: Any = engine.backend
    assert len(list(engine.submit(request([1] * 100, count=1)))) == 1
    assert backend.runs == [[70], [30]]
    backend.runs.clear()
    all_submitted = pause_thread(engine)
    streams = [engine.submit(request([n] * 60, count=1)) for n in (2, 3)]
    all_submitted.set()
    assert all(len(list(stream)) == 1 for stream in streams)
    assert sum(backend.runs[0]) == 40, "with another prompt the step has its usual length"
    backend.runs.clear()
    assert len(engine.extend(engine.open([4] * 60), num_logits=60)) == 60
    assert backend.runs == [[40], [20]], "outputs of so many tokens would take much memory"
    engine.close()


def finishing_order(engine: Engine, submitted: dict[str, Request]) -> list[str]:
    """Submit all at one moment, and say in which order they end."""
    order: list[str] = []
    streams = []

    def submit() -> None:
        for name, single in submitted.items():
            stream = engine.submit(single)
            end = stream._queue.end

            def ended(error: Any = None, name: str = name, end: Any = end) -> None:
                order.append(name)
                end(error)

            stream._queue.end = ended  # type: ignore[method-assign]
            streams.append(stream)

    engine.call(submit)
    for stream in streams:
        list(stream)
    return order


def test_prompts_share_the_batch_fairly():
    engine = new_engine(pages=1200, context=5000)
    submitted = {"big": request([5] * 3000, count=1), "small": request([6] * 40, count=1)}
    assert finishing_order(engine, submitted) == ["small", "big"]


def test_higher_priority_first():
    engine = new_engine(pages=12)
    submitted = {str(n): request([n] * 30, count=3, priority=n) for n in range(3)}
    assert finishing_order(engine, submitted) == ["2", "1", "0"], "memory for one at a time"


def test_async_iteration():
    engine = new_engine()
    submitted = [request([n, n + 1], seed=n, count=12) for n in range(5)]

    async def read(single: Request) -> list[int]:
        return [step.token async for step in engine.submit(single)]

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(read(single) for single in submitted))

    assert asyncio.run(all_of_them()) == [expected(r) for r in submitted]
