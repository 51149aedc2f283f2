"""Engines on the null model, requests, and what the plain loop writes."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

from helpers import null_model
from unspool.engine.engine import Engine
from unspool.engine.reference import write
from unspool.engine.request import Limits, Request
from unspool.sampling import SamplingSettings


def letter(token: int) -> bytes:
    return b"%c" % (97 + token % 26)


def new_engine(token_bytes: Any = letter, **shape: Any) -> Engine:
    return Engine(null_model.NullModel(**shape), token_bytes)


def request(
    prompt: Sequence[int], count: int = 20, *, seed: int = 0, settings: Any = None,
    limits: Any = None, **options: Any,
) -> Request:  # fmt: skip
    """A request of `count` tokens, sampled from the whole distribution unless `settings` differ."""
    free = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": seed}
    return Request(
        prompt=tuple(prompt),
        settings=SamplingSettings(**{**free, **(settings or {})}),
        limits=Limits(**{"max_tokens": count, "context": 5000, **(limits or {})}),
        **options,
    )


def pause_thread(engine: Engine) -> threading.Event:
    """Pause the engine's thread until the event that is returned is set, or for 30 s."""
    paused, resume = threading.Event(), threading.Event()

    def wait() -> None:
        paused.set()
        resume.wait(30)

    engine.loop.post(wait)
    assert paused.wait(30)
    return resume


def expected(submitted: Request, vocab_size: int = 40) -> list[int]:
    """What the plain loop writes: no engine, no pages, no batch."""

    class Text:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def append(self, tokens: Any) -> Any:
            self.tokens += list(tokens)
            return null_model.logits_after(self.tokens, vocab_size)

    steps = write(
        Text(), submitted.prompt, submitted.settings, submitted.limits, lambda token: b"x"
    )
    return [step.token for step in steps]


def nothing_leaks(engine: Engine) -> None:
    """Check that nothing runs, and that no page is held but by the prefix cache."""

    def check() -> None:
        assert not engine.scheduler.tasks()
        engine.tree.index.clear()
        assert engine.tree.pool.used == 0

    engine.call(check)


def some_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts that often begin alike."""
    chance = random.Random(seed)
    stems = [[chance.randrange(40) for _ in range(30)] for _ in range(4)]
    return [
        chance.choice(stems)[: chance.randint(1, 30)]
        + [chance.randrange(40) for _ in range(chance.randint(1, 12))]
        for _ in range(count)
    ]
