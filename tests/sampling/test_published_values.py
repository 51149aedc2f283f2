"""The values that llama.cpp publishes for its samplers (tests/test-sampling.cpp)."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.sampling_support import after, neutral

FOUR = [0.1, 0.2, 0.3, 0.4]
FALLING = [0.4, 0.3, 0.2, 0.1]
FIVE = [0.2] * 5


def close(result: object, expected: list[float]) -> bool:
    return bool(np.allclose(result, expected, atol=1e-5))


@pytest.mark.parametrize(
    ("k", "expected"), [(1, [0, 0, 0, 1]), (3, [0, 2 / 9, 3 / 9, 4 / 9]), (4, FOUR)]
)
def test_top_k(k: int, expected: list[float]) -> None:
    assert close(after("top_k", FOUR, neutral(top_k=k)), expected)


@pytest.mark.parametrize(
    ("p", "expected"),
    [(0.0, [0, 0, 0, 1]), (0.7, [0, 0, 3 / 7, 4 / 7]), (0.8, [0, 2 / 9, 3 / 9, 4 / 9])],
)
def test_top_p(p: float, expected: list[float]) -> None:
    assert close(after("top_p", FOUR, neutral(top_p=p)), expected)


@pytest.mark.parametrize(
    ("p", "num_kept"), [(0.24, 4), (0.26, 3), (0.49, 3), (0.51, 2), (0.74, 2), (0.76, 1), (1.0, 1)]
)
def test_min_p(p: float, num_kept: int) -> None:
    expected = np.array(FOUR) * (np.arange(4) >= 4 - num_kept)
    assert close(after("min_p", FOUR, neutral(min_p=p)), list(expected / expected.sum()))


@pytest.mark.parametrize(("threshold", "first"), [(0.09, 3), (0.19, 2), (0.29, 1), (0.39, 0)])
def test_xtc(threshold: float, first: int) -> None:
    expected = np.array(FALLING) * (np.arange(4) >= first)
    settings = neutral(xtc_probability=1.0, xtc_threshold=threshold)
    assert close(after("xtc", FALLING, settings), list(expected / expected.sum()))


def test_typical() -> None:
    half = neutral(typical_p=0.5)
    assert close(after("typical_p", [0.97, 0.01, 0.01, 0.01], half), [1, 0, 0, 0])
    assert close(after("typical_p", [0.4, 0.2, 0.2, 0.2], half), [0, 1 / 3, 1 / 3, 1 / 3])


def test_top_n_sigma() -> None:
    assert close(after("top_n_sigma", FOUR, neutral(top_n_sigma=1)), [0, 0, 0.428571, 0.571429])
    assert close(after("top_n_sigma", FOUR, neutral(top_n_sigma=3)), FOUR)


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([0], [0, 0.25, 0.25, 0.25, 0.25]),
        ([0, 1, 2], [0, 0, 0, 0.5, 0.5]),
        ([0, 1, 2, 0, 0], [0, 0, 0, 0.5, 0.5]),
    ],
)
def test_repetition_penalty(history: list[int], expected: list[float]) -> None:
    settings = neutral(repetition_penalty=50.0)
    assert close(after("repetition_penalty", FIVE, settings, history), expected)


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([0], [0.000011, 0.249997, 0.249997, 0.249997, 0.249997]),
        ([0, 1, 2], [0.000023, 0.000023, 0.000023, 0.499966, 0.499966]),
        ([0, 1, 2, 0, 0], [0.000000, 0.000023, 0.000023, 0.499977, 0.499977]),
    ],
)
def test_frequency_and_presence(history: list[int], expected: list[float]) -> None:
    settings = neutral(frequency_penalty=5.0, presence_penalty=5.0)
    once = after("frequency_penalty", FIVE, settings, history)
    assert close(after("presence_penalty", list(once), settings, history), expected)


@pytest.mark.parametrize(
    ("size", "history", "multiplier", "allowed", "breakers", "expected"),
    [
        (4, [0, 1], 1.0, 2, (), [0.25] * 4),
        (4, [0, 1, 2, 0, 1], 1.0, 2, (), [0.296923, 0.296923, 0.109232, 0.296923]),
        (5, [0, 1, 3, 4, 0, 1], 1.0, 2, (3,), [0.2] * 5),
        (5, [0, 1, 2, 0, 1], 2.0, 2, (), [0.241818, 0.241818, 0.032727, 0.241818, 0.241818]),
        (5, [0, 1, 2, 3, 4, 0, 1], 1.0, 4, (), [0.2] * 5),
    ],
)
def test_dry(
    size: int,
    history: list[int],
    multiplier: float,
    allowed: int,
    breakers: tuple[int, ...],
    expected: list[float],
) -> None:
    settings = neutral(
        dry_multiplier=multiplier,
        dry_base=1.1,
        dry_allowed_length=allowed,
        dry_window=len(history),
        dry_breakers=breakers,
    )
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
