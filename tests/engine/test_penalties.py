"""What penalties see of a text that is written ahead of what is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from helpers import null_model
from unspool.engine.engine import Engine
from unspool.engine.request import Limits, Request
from unspool.sampling import SamplingSettings


class Knowing:
    """A drafter that guesses right, several tokens at a time."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = list(text)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        return self.text[len(tokens) : len(tokens) + min(most, 5)]

    def learn(self, proposed: int, accepted: int, seconds: float) -> None:
        pass


def write(overlaps: bool = False, drafter: Any = None) -> tuple[list[int], int]:
    """A text, and how many of its tokens were guessed."""
    engine = Engine(null_model.NullModel(pages=200, overlaps=overlaps), lambda token: b"x")
    submitted = Request(
        prompt=(1, 2, 3),
        settings=SamplingSettings(temperature=0, frequency_penalty=3.0, penalty_window=5),
        limits=Limits(max_tokens=40, context=500),
        drafter=drafter,
    )
    stream = engine.submit(submitted)
    tokens = [step.token for step in stream]
    engine.close()
    return tokens, stream.accepted


@pytest.fixture(autouse=True)
def same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any text, the sampled token depends on the penalties alone."""
    logits = np.linspace(5, 0, 40, dtype=np.float32)
    monkeypatch.setattr(null_model, "logits_after", lambda tokens, size: logits)


def test_each_token_of_a_draft_is_judged_by_those_right_before_it():
    alone, _ = write()
    assert len(set(alone)) > 2, "the penalties move the picks"
    drafted, accepted = write(drafter=Knowing([1, 2, 3, *alone]))
    assert drafted == alone
    assert accepted > 30, "every guess was right"


def test_a_step_ahead_sees_the_token_that_is_not_read_yet():
    assert write(overlaps=True)[0] == write()[0]
