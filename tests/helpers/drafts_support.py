"""Helpers for tests of drafters: scripted drafters, and comparison of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from helpers.fake_backend import FakeBackend
from unspool.engine.engine import Engine
from unspool.engine.request import Limits, Request
from unspool.engine.results import Step
from unspool.sampling import SamplingSettings

UNCHANGED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}  # the model's own


class Says:
    """Proposes the result of a function of the text; records every `learn` call."""

    def __init__(self, say: Callable[[Sequence[int]], Any]) -> None:
        self.say = say
        self.rounds: list[tuple[int, int, float]] = []

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        result: list[int] = self.say(tokens)
        return result

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        self.rounds.append((proposed, accepted, seconds))
        return None


def garbage(seed: int, vocabulary: int, longest: int = 6) -> Says:
    """Random tokens, some of them impossible, sometimes more than asked for."""
    chance = np.random.default_rng(seed)

    def say(tokens: Sequence[int]) -> list[int]:
        count = int(chance.integers(0, longest))
        result: list[int] = chance.integers(0, vocabulary, count).tolist()
        if chance.random() < 0.1:
            result += [vocabulary + 3, -1, 1 << 70]
        return result

    return Says(say)


def table(vocabulary: int, seed: int = 0) -> Any:
    """A distribution after each pair of tokens; in eighths, so that it can be counted out."""
    chance = np.random.default_rng(seed)
    cells = chance.integers(0, vocabulary, (vocabulary, vocabulary, 8))
    cells = np.minimum(cells, chance.integers(0, vocabulary, cells.shape))
    return np.stack([(cells == token).mean(-1) for token in range(vocabulary)], -1)


def fake_engine(probabilities: Any, **options: Any) -> Engine:
    backend = FakeBackend(probabilities, **options)
    letter = lambda token: bytes([97 + token % 26])  # noqa: E731
    return Engine(backend, letter, max_waiting=1 << 20)


def a_request(prompt: Sequence[int], drafter: Any = None, **options: Any) -> Request:
    limits = {name: options.pop(name) for name in LIMITS if name in options}
    extra = {name: options.pop(name) for name in ("guards", "priority") if name in options}
    return Request(
        prompt=tuple(prompt),
        settings=SamplingSettings(**options),
        limits=Limits(**{"max_tokens": 40, "context": 64, **limits}),
        drafter=drafter,
        **extra,
    )


LIMITS = ("max_tokens", "context", "end_ids", "stop", "sample", "top", "explain")


def step_facts(steps: Sequence[Step]) -> list[tuple[Any, ...]]:
    """All of a step that drafts may not change (the clock, and what the draft said)."""
    return [(s.token, s.text, s.position, s.finish_reason, s.draw, s.probability) for s in steps]


def alike(first: Sequence[Step], second: Sequence[Step]) -> bool:
    """The same but for rounding: a run of many tokens adds its numbers up in another order."""
    equal = [(s.token, s.text, s.position, s.finish_reason) for s in first] == [
        (s.token, s.text, s.position, s.finish_reason) for s in second
    ]
    near = [s.logprob for s in first] == pytest.approx([s.logprob for s in second], abs=1e-3)
    return equal and near


def leftover(engine: Engine) -> int:
    def count() -> int:
        engine.tree.index.clear()
        return engine.tree.pool.used

    return engine.call(count)
