"""The values that llama.cpp publishes for its samplers (tests/test-sampling.cpp)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.sampling_support import after, neutral

FOUR = [0.1, 0.2, 0.3, 0.4]
FALLING = [0.4, 0.3, 0.2, 0.1]
FIVE = [0.2] * 5


def close(result: object, expected: list[float]) -> bool:
    return bool(np.allclose(result, expected, atol=1e-5))


@pytest.mark.parametrize(
    ("stage", "value", "num_kept"),
    [
        ("top_k", 1, 1), ("top_k", 3, 3), ("top_k", 4, 4),
        ("top_p", 0.0, 1), ("top_p", 0.7, 2), ("top_p", 0.8, 3),
        ("min_p", 0.24, 4), ("min_p", 0.26, 3), ("min_p", 0.49, 3), ("min_p", 0.51, 2),
        ("min_p", 0.74, 2), ("min_p", 0.76, 1), ("min_p", 1.0, 1),
        ("top_n_sigma", 1, 2), ("top_n_sigma", 3, 4),
    ],
)  # fmt: skip
def test_the_likeliest_are_kept(stage: str, value: float, num_kept: int) -> None:
    expected = np.array(FOUR) * (np.arange(4) >= 4 - num_kept)
    result = after(stage, FOUR, neutral(**{stage: value}))
    assert close(result, list(expected / expected.sum()))


@pytest.mark.parametrize(("threshold", "first"), [(0.09, 3), (0.19, 2), (0.29, 1), (0.39, 0)])
def test_xtc(threshold: float, first: int) -> None:
    expected = np.array(FALLING) * (np.arange(4) >= first)
    settings = neutral(xtc_probability=1.0, xtc_threshold=threshold)
    assert close(after("xtc", FALLING, settings), list(expected / expected.sum()))


def test_typical() -> None:
    half = neutral(typical_p=0.5)
    assert close(after("typical_p", [0.97, 0.01, 0.01, 0.01], half), [1, 0, 0, 0])
    assert close(after("typical_p", [0.4, 0.2, 0.2, 0.2], half), [0, 1 / 3, 1 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("history", "repeated", "counted"),
    [
        ([0], [0, 0.25, 0.25, 0.25, 0.25], [0.000011, 0.249997, 0.249997, 0.249997, 0.249997]),
        ([0, 1, 2], [0, 0, 0, 0.5, 0.5], [0.000023, 0.000023, 0.000023, 0.499966, 0.499966]),
        ([0, 1, 2, 0, 0], [0, 0, 0, 0.5, 0.5], [0.0, 0.000023, 0.000023, 0.499977, 0.499977]),
    ],
)
def test_penalties(history: list[int], repeated: list[float], counted: list[float]) -> None:
    settings = neutral(repetition_penalty=50.0)
    assert close(after("repetition_penalty", FIVE, settings, history), repeated)
    settings = neutral(frequency_penalty=5.0, presence_penalty=5.0)
    once = after("frequency_penalty", FIVE, settings, history)
    assert close(after("presence_penalty", list(once), settings, history), counted)


@pytest.mark.parametrize(
    ("history", "options", "expected"),
    [
        ([0, 1], {}, [0.25] * 4),
        ([0, 1, 2, 0, 1], {}, [0.296923, 0.296923, 0.109232, 0.296923]),
        ([0, 1, 3, 4, 0, 1], {"dry_breakers": (3,)}, [0.2] * 5),
        ([0, 1, 2, 0, 1], {"dry_multiplier": 2.0}, [0.241818] * 2 + [0.032727] + [0.241818] * 2),
        ([0, 1, 2, 3, 4, 0, 1], {"dry_allowed_length": 4}, [0.2] * 5),
    ],
)
def test_dry(history: list[int], options: dict[str, Any], expected: list[float]) -> None:
    usual = {"dry_multiplier": 1.0, "dry_base": 1.1, "dry_window": len(history)}
    size, settings = len(expected), neutral(**{**usual, **options})
    assert close(after("dry", [1 / size] * size, settings, history), expected)


@pytest.mark.parametrize("order", ["kp", "km", "pk", "pm", "mk", "kpm", "kmp", "pkm", "mkp", "mpk"])
def test_queues_over_ten_thousand(order: str) -> None:
    """llama.cpp's queue test: token i has weight i; 100 for k, 0.8 for p, 0.1 for m."""
    from unspool.sampling import Candidates, RowInput, Rows
    from unspool.sampling.rows import RowSettings
    from unspool.sampling.stages import STAGES

    names = {"k": "top_k", "p": "top_p", "m": "min_p"}
    rows = Rows(RowSettings([neutral(top_k=100, top_p=0.8, min_p=0.1)]), [RowInput()])
    size, least = 10_000, 0
    with np.errstate(divide="ignore"):
        candidates = Candidates(np.log(np.arange(size, dtype=np.float32))[None])
    for letter in order:
        candidates = STAGES[names[letter]].apply(candidates, rows)
        if letter == "k":
            least = max(least, size - 100)
        elif letter == "p":
            goal = np.ceil(0.8 * sum(range(least, size)))
            running = np.cumsum(np.arange(size - 1, least - 1, -1))
            least = size - 1 - int(np.searchsorted(running, goal))
        else:
            least = max(least, 1000)
        line = candidates.sort_by_logit()
        num_kept = int(line.remaining()[0])
        assert line.ids[0, 0] == size - 1
        assert abs(int(line.ids[0, num_kept - 1]) - least) <= 1  # float32 logits at the very border
