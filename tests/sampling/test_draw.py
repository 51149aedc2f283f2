"""The draw: the generator's published vectors, uniformity, and the distribution that comes out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from helpers.sampling_support import neutral, softmax
from unspool.sampling import Chain, RowInput, SamplingSettings, uniform
from unspool.sampling.draw import philox, sample_index, seed_bits, uniforms

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's known answers for philox4x32-10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox(counter, key) == expected
    arrays = [np.full(3, word, dtype=np.uint64) for word in (*counter, *key)]
    numbers = philox(tuple(arrays[:4]), tuple(arrays[4:]))  # type: ignore[arg-type]
    assert [set(word.tolist()) for word in numbers] == [{word} for word in expected]


@given(
    rows=st.lists(
        st.tuples(st.integers(), st.integers(0, 2**40), st.integers(0, 2**31)),
        min_size=9,
        max_size=20,
    ),
    stream=st.integers(0, 5),
)
def test_many_at_once_are_the_same_numbers(rows: list[tuple[int, int, int]], stream: int) -> None:
    seeds, samples, positions = (list(column) for column in zip(*rows, strict=True))
    numbers = uniforms(seeds, samples, positions, stream).tolist()
    assert numbers == [uniform(*row, stream) for row in rows]
    assert all(0 <= u < 1 for u in numbers)


@pytest.mark.parametrize("count", [3, 12])
def test_each_pass_over_a_canvas_has_numbers_of_its_own(count: int) -> None:
    seeds, places = [7] * count, list(range(count))
    plain = uniforms(seeds, [0] * count, places).tolist()
    assert uniforms(seeds, [0] * count, places, 0, [None] * count).tolist() == plain, "as ever"
    passes = [uniforms(seeds, [0] * count, places, 0, [n] * count).tolist() for n in range(3)]
    passes += [uniforms(seeds, [0] * count, places, 1, [0] * count).tolist(), plain]
    assert len({number for numbers in passes for number in numbers}) == 5 * count
    mixed = uniforms(seeds, [0] * count, places, 0, [n % 2 or None for n in range(count)])
    assert mixed[0] == plain[0] and mixed[1] == passes[1][1]


def test_any_int_is_a_seed() -> None:
    seeds = [0, 1, -1, -2, 2**63, 2**63 + 1, 2**64, 2**64 + 1, -(2**64), 10**50, -(10**50)]
    assert len({seed_bits(seed) for seed in seeds}) == len(seeds)
    assert seed_bits(-1) == seed_bits(2**64 - 1)  # documented


def test_numbers_are_uniform_and_unrelated() -> None:
    count, zeros = 20_000, [0] * 20_000
    places = list(range(count))
    base = uniforms([7] * count, zeros, places)
    assert stats.kstest(base, "uniform").pvalue > 0.001
    others = {
        "seed": uniforms([8] * count, zeros, places),
        "sample": uniforms([7] * count, [1] * count, places),
        "stream": uniforms([7] * count, zeros, places, 1),
        "position": np.roll(base, 1),
    }
    for name, other in others.items():
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / count**0.5, name


def test_the_draw_never_lands_on_what_was_removed() -> None:
    def lands(u: float, weights: list[float]) -> int:
        running = np.array(weights).cumsum()
        return sample_index(u * float(running[-1]), running, np.array(weights))

    several, single = [0.5, 0.3, 0.2, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]
    last = float(np.nextafter(1.0, 0.0))
    assert (lands(last, several), lands(last, single)) == (2, 0)
    assert (lands(0.0, several), lands(0.0, single)) == (0, 0)
    assert (lands(0.5, several), lands(0.5, single)) == (1, 0)  # [low, high)
    for total in np.linspace(0.1, 3, 200):  # u·total may round to the total
        assert lands(last, [total, total / 3, 0.0]) == 1


def chi_square(
    chain: Chain, logits: np.ndarray[tuple[int, int], np.dtype[np.float32]], expected: np.ndarray
) -> float:
    rows, draws = len(logits), 10_000
    counts = np.zeros(logits.shape[1])
    for start in range(0, draws, rows):
        inputs = [RowInput(position=start + n) for n in range(rows)]
        for pick in chain.pick(logits, inputs):
            counts[pick.token] += 1
    alive = expected > 0
    assert counts[~alive].sum() == 0
    return float(stats.chisquare(counts[alive], expected[alive] * draws).pvalue)


CASES: list[tuple[SamplingSettings, Callable[[np.ndarray], np.ndarray]]] = [
    (neutral(seed=11), softmax),
    (neutral(seed=12, temperature=0.6), lambda x: softmax(x / 0.6)),
    (neutral(seed=13, top_k=6), lambda x: softmax(np.where(x >= np.sort(x)[-6], x, -np.inf))),
]


@pytest.mark.parametrize(("case", "width"), [(0, 16), (1, 600), (2, 16)])
def test_the_distribution_drawn_is_the_one_told(case: int, width: int) -> None:
    on, formula = CASES[case]
    line = np.random.default_rng(width).standard_normal(width).astype(np.float32)
    logits = np.repeat(line[None], 500, axis=0)
    assert chi_square(Chain([on] * 500), logits, formula(line.astype(np.float64))) > 0.001


def test_a_planted_bias_fails_the_same_test(monkeypatch: pytest.MonkeyPatch) -> None:
    import unspool.sampling.rows as rows

    monkeypatch.setattr(rows, "uniforms", lambda *args: uniforms(*args) ** 1.1)
    on, formula = CASES[0]
    line = np.random.default_rng(16).standard_normal(16).astype(np.float32)
    logits = np.repeat(line[None], 500, axis=0)
    assert chi_square(Chain([on] * 500), logits, formula(line.astype(np.float64))) < 0.001
