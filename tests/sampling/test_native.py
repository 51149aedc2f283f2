"""The compiled kernels beside numpy: every operation, and whole chains, give the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.sampling_support import CHAINS, neutral
from unspool import native
from unspool.sampling import (
    BadLogitsError,
    Chain,
    Pick,
    RowInput,
    SamplingSettings,
    arrays,
)
from unspool.sampling.arrays import NativeOperations, NumpyOperations

pytestmark = pytest.mark.skipif(
    native.missing_reason() is not None, reason="the kernels are not built"
)

Matrix = np.ndarray[Any, Any]
INF = math.inf
PLAIN = NumpyOperations()


@pytest.fixture(scope="module")
def ops() -> NativeOperations:
    return NativeOperations()


@contextmanager
def numpy_alone() -> Iterator[None]:
    before, arrays._numpy = arrays._numpy, PLAIN
    try:
        yield
    finally:
        arrays._numpy = before


def _tied(chance: np.random.Generator, x: Matrix) -> Matrix:
    return np.asarray(np.round(x / 2))


def _with_gaps(chance: np.random.Generator, x: Matrix) -> Matrix:
    x[chance.random(x.shape) < chance.choice([0.01, 0.5, 0.999])] = -INF
    x[:, chance.integers(0, x.shape[1])] = 1.0  # at least one remains
    return x


def _signed_zeros(chance: np.random.Generator, x: Matrix) -> Matrix:
    return np.asarray(np.where(x > 0, 0.0, -0.0))


KINDS: dict[str, Callable[[np.random.Generator, Matrix], Matrix]] = {
    "bell": lambda chance, x: x * 4,
    "tied": _tied,
    "gaps": _with_gaps,
    "equal": lambda chance, x: x * 0 + 3.5,
    "zeros": _signed_zeros,
    "huge spread": lambda chance, x: x * 1e30,
    "one peak": lambda chance, x: np.where(x == x.max(-1, keepdims=True), 80.0, x),
    "rising": lambda chance, x: np.sort(x, axis=-1),
    "falling": lambda chance, x: -np.sort(x, axis=-1),
}


def make_rows(kind: str, seed: int, width: int, rows: int = 2) -> Matrix:
    chance = np.random.default_rng(seed)
    x = KINDS[kind](chance, chance.standard_normal((rows, width)) * 3)
    return np.ascontiguousarray(x, np.float32)


widths = st.one_of(
    st.integers(1, 300), st.integers(301, 5000), st.sampled_from([4096, 49_152, 151_936, 200_001])
)
rows_of_logits = st.builds(make_rows, st.sampled_from(sorted(KINDS)), st.integers(0, 10**6), widths)


@given(x=rows_of_logits)
@settings(max_examples=50, deadline=None)
def test_peak_mass_and_entropy(ops: NativeOperations, x: Matrix) -> None:
    peak, total, entropy = ops.softmax_stats(x, None, True)
    expected = PLAIN.softmax_stats(x.astype(np.float64), None, True)
    assert peak.dtype == np.float64 and (peak == x.max(-1, keepdims=True)).all()
    assert (ops.amax(x) == peak).all()
    np.testing.assert_allclose(total, expected[1], rtol=1e-6)
    np.testing.assert_allclose(entropy, expected[2], rtol=1e-6, atol=1e-6)
    again = ops.softmax_stats(x, peak, True)
    assert (again[1] == total).all() and (again[2] == entropy).all()
    for row in range(len(x)):  # alone as beside another
        alone = ops.softmax_stats(x[row : row + 1], None, True)
        assert alone[1] == total[row] and alone[2] == entropy[row]


@given(x=rows_of_logits, count=st.one_of(st.integers(1, 300), st.integers(1, 20_000)))
@settings(max_examples=60, deadline=None)
def test_largest(ops: NativeOperations, x: Matrix, count: int) -> None:
    values, columns = ops.largest(x, count)
    order = np.argsort(-x, axis=-1, kind="stable")[:, :count]
    assert (columns == order).all()
    assert (values == np.take_along_axis(x, order, -1)).all()


@given(x=rows_of_logits, share=st.floats(0, 1), how=st.sampled_from(["at", "between", "all"]))
@settings(max_examples=50, deadline=None)
def test_at_or_above(ops: NativeOperations, x: Matrix, share: float, how: str) -> None:
    place = min(x.shape[1] - 1, int(share**4 * x.shape[1]))
    bound = np.sort(x, axis=-1)[:, ::-1][:, place : place + 1].astype(np.float64)
    bound = {"at": bound, "between": bound - 1e-4, "all": np.full_like(bound, -INF)}[how]
    for actual, expected in zip(
        ops.at_or_above(x, bound), PLAIN.at_or_above(x, bound), strict=True
    ):
        assert (actual == expected).all()


@given(x=rows_of_logits, share=st.floats(0, 1, exclude_max=True))
@settings(max_examples=60, deadline=None)
def test_logit_and_rank(ops: NativeOperations, x: Matrix, share: float) -> None:
    tokens = np.array([int(share * x.shape[1])] * len(x))
    for actual, expected in zip(
        ops.logit_and_rank(x, tokens), PLAIN.logit_and_rank(x, tokens), strict=True
    ):
        assert actual.shape == expected.shape and (actual == expected).all()


@given(tokens=st.lists(st.integers(-3, 40), max_size=200))
def test_count_tokens(ops: NativeOperations, tokens: list[int]) -> None:
    tokens_found, counts = ops.count_tokens(np.array(tokens, np.int64), 30)
    expected = PLAIN.count_tokens(np.array(tokens, np.int64), 30)
    assert len(set(tokens_found.tolist())) == len(tokens_found)
    pairs = zip(tokens_found.tolist(), counts.tolist(), strict=True)
    assert dict(pairs) == dict(zip(*(a.tolist() for a in expected), strict=True))


def test_what_the_kernels_do_not_take_is_numpys(ops: NativeOperations) -> None:
    x = make_rows("bell", 1, 1000, rows=4)
    for other in (x.astype(np.float64), x[:, ::2], x[::2]):
        assert (ops.amax(other) == other.max(-1, keepdims=True)).all()
        assert (ops.largest(other, 5)[1] == np.argsort(-other, -1, kind="stable")[:, :5]).all()
    x.flags.writeable = False  # logits that a backend keeps
    assert (ops.amax(x) == x.max(-1, keepdims=True)).all()


def near(a: Pick, b: Pick) -> None:
    assert (a.token, a.rank) == (b.token, b.rank)
    for value, other in (
        (a.logprob, b.logprob), (a.entropy, b.entropy), (a.probability, b.probability)
    ):  # fmt: skip
        assert value == pytest.approx(other, rel=1e-6, abs=1e-6)
    assert [c.token for c in a.candidates] == [c.token for c in b.candidates]
    pairs = [(c.logprob, c.probability) for c in a.candidates]
    others = [(c.logprob, c.probability) for c in b.candidates]
    np.testing.assert_allclose(pairs, others, rtol=1e-5, atol=1e-6)
    for s, t in zip(a.stages, b.stages, strict=True):
        assert (s.name, s.kept, s.removed, s.changed) == (t.name, t.kept, t.removed, t.changed)
        assert [token for token, _ in s.top] == [token for token, _ in t.top]
        assert s.kept_mass == pytest.approx(t.kept_mass, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("number", range(len(CHAINS)))
@pytest.mark.parametrize("width", [300, 2500])
def test_chains_pick_alike(number: int, width: int) -> None:
    """Over all chains and widths, several thousand rows."""
    chance = np.random.default_rng(number)
    rows = 20
    chain = Chain([SamplingSettings(seed=n, **CHAINS[number]) for n in range(rows)])
    for spread in (0.5, 2.0, 5.0):
        logits = (chance.standard_normal((rows, width)) * spread).astype(np.float32)
        logits[::5] = np.round(logits[::5])
        logits[1::5, 20 : width - 20] = -INF
        history = chance.integers(0, width, (rows, 60))
        inputs = [RowInput(history[n][: 20 + n], prompt_length=10) for n in range(rows)]
        actual = chain.pick(logits, inputs, top=5, explain=spread == 2.0)
        with numpy_alone():
            expected = chain.pick(logits, inputs, top=5, explain=spread == 2.0)
        for a, b in zip(actual, expected, strict=True):
            near(a, b)


def test_chains_pick_alike_over_a_real_vocabulary() -> None:
    width = 151_936
    chance = np.random.default_rng(width)
    for number, options in enumerate(CHAINS):
        logits = (chance.standard_normal((1, width)) * 3).astype(np.float32)
        inputs = RowInput(chance.integers(0, width, 500), prompt_length=100)
        chain = Chain(SamplingSettings(seed=number, **options))
        actual = chain.pick_one(logits, inputs, top=20)
        with numpy_alone():
            near(actual, chain.pick_one(logits, inputs, top=20))


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize("width", [300, 1000])
def test_bad_logits_are_told_alike(bad: float, width: int) -> None:
    def outcome() -> Any:
        try:
            return chain.pick(logits)
        except BadLogitsError as error:
            return str(error), error.rows

    chain = Chain([SamplingSettings(seed=1), neutral(seed=1), neutral(temperature=0)])
    for place in (0, 17, width - 1):
        logits = make_rows("bell", 5, width, 3)
        logits[2, place] = bad
        if bad == -INF:
            logits[2] = -INF
        actual = outcome()
        with numpy_alone():
            expected = outcome()
        if bad == INF:  # infinitely likely: that one alone remains
            assert actual[2].token == expected[2].token == place
        else:
            assert actual == expected == (actual[0], (2,))
