"""Intervals and areas against values worked out by hand, and against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from unspool.costs import part as s


@pytest.mark.parametrize(("successes", "n"), [(0, 8), (3, 20), (20, 20), (7, 9), (50, 1000)])
def test_wilson_is_scipys(successes: int, n: int):
    expected = stats.binomtest(successes, n).proportion_ci(method="wilson")
    assert s.wilson(successes, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_of_nothing_knows_nothing():
    assert s.wilson(0, 0) == (0.0, 1.0)


def test_bootstrap_of_a_mean_is_near_the_normal_interval():
    values = np.random.default_rng(3).normal(5, 2, 400)
    low, high = s.bootstrap(values, lambda rows: float(rows.mean()))
    reach = 1.96 * values.std(ddof=1) / math.sqrt(len(values))
    assert low == pytest.approx(values.mean() - reach, abs=0.06)
    assert high == pytest.approx(values.mean() + reach, abs=0.06)


def test_bootstrap_is_the_same_again_and_of_one_value_unknown():
    values = [1.0, 4.0, 2.0, 8.0]
    first = s.bootstrap(values, lambda rows: float(rows.mean()))
    assert first == s.bootstrap(values, lambda rows: float(rows.mean()))
    assert all(math.isnan(end) for end in s.bootstrap([1.0], lambda rows: float(rows.mean())))


def test_bootstrap_means_of_columns_are_those_of_each_column():
    rows = np.random.default_rng(1).normal(size=(30, 3))
    low, high = s.bootstrap_means(rows, seed=5)
    for column in range(3):
        expected = s.bootstrap(rows[:, column], lambda sample: float(sample.mean()), seed=5)
        assert (low[column], high[column]) == pytest.approx(expected)


def test_bootstrap_means_leave_gaps_out():
    rows = np.array([[1.0, np.nan], [1.0, 2.0], [1.0, 2.0]])
    low, high = s.bootstrap_means(rows)
    assert low == pytest.approx([1, 2]) and high == pytest.approx([1, 2])


def test_auc_by_hand_and_by_mann_whitney():
    assert s.auc([3, 2], [1, 2]) == pytest.approx((2 + 1.5) / 4)
    assert s.auc([1], [2]) == 0.0
    a, b = np.random.default_rng(2).normal(size=(2, 25)).round(1)
    expected = stats.mannwhitneyu(a, b).statistic / 625
    assert s.auc(a, b) == pytest.approx(expected)
    assert math.isnan(s.auc([], [1]))


def test_figures_say_what_they_are():
    mean = s.mean_figure("NLL", [1.0, 2.0, 3.0], "nats", why="a text each")
    assert mean.value == 2.0 and mean.low is not None and mean.low < 2 < (mean.high or 0)
    assert mean.why == "a text each; bootstrap" and mean.n == 3
    share = s.share_figure("loops", 2, 8)
    assert (share.value, share.unit, share.why) == (0.25, "%", "Wilson")
    median = s.median_figure("ms", [1.0, 2.0, 100.0], "ms")
    assert median.value == 2.0
    single = s.mean_figure("ms", [4.0])
    assert (single.value, single.low, single.high) == (4.0, None, None)
    empty = s.mean_figure("ms", [])
    assert empty.value is None and empty.formatted() == "–"


def test_series_of_shares_and_means():
    y, low, high = s.share_bounds([0, 4], 4)
    assert y == [0, 1] and low[0] == 0 and high[1] == 1 and high[0] == s.wilson(0, 4)[1]
    y, low, high = s.mean_bounds([[1.0, 3.0], [5.0]])
    assert y == [2, 5] and low[0] == 1 and high[0] == 3 and (low[1], high[1]) == (5, 5)
