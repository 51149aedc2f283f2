"""Figures with confidence intervals.

mean_figure("NLL", values, "nats")            # bootstrap over the values
share_figure("texts that loop", 3, 20)        # Wilson
bootstrap(pairs, lambda rows: ...)            # any statistic of resampled rows
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unspool.costing.part import Figure

_DRAWS = 2000
_Z = 1.959963984540054  # of the normal distribution: 95 % are within

Better = Literal["lower", "higher", ""]


def bootstrap(
    rows: ArrayLike,
    statistic: Callable[[NDArray[Any]], float],
    *,
    draws: int = _DRAWS,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of a statistic.

    Rows must be independent: texts, not tokens.
    """
    data = np.asarray(rows)
    if len(data) < 2:
        return math.nan, math.nan
    random = np.random.default_rng(seed)
    samples = random.integers(0, len(data), (draws, len(data)))
    values = [statistic(data[indices]) for indices in samples]
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)


def interval_around(
    value: float, rows: ArrayLike, statistic: Callable[[NDArray[Any]], float]
) -> tuple[float, float]:
    """Return the bootstrap interval, extended to include the value.

    With few rows, a discrete statistic (a token count, a position) can be outside of the interval.
    """
    low, high = bootstrap(rows, statistic)
    return min(low, value), max(high, value)


def bootstrap_means(
    rows: ArrayLike, *, draws: int = _DRAWS, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return bootstrap intervals of the column means; rows are texts, nan marks gaps."""
    data = np.asarray(rows, np.float64)
    random = np.random.default_rng(seed)
    samples = random.integers(0, len(data), (draws, len(data)))
    is_known = ~np.isnan(data)
    filled = np.where(is_known, data, 0.0)
    weights = np.stack([np.bincount(indices, minlength=len(data)) for indices in samples])
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column without values stays nan
        means = (weights @ filled) / (weights @ is_known)
        low, high = np.nanpercentile(means, [2.5, 97.5], axis=0)
    return low, high


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share, valid for small counts too."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = successes / n, _Z**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    reach = _Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def mean_figure(
    name: str,
    values: Sequence[float],
    unit: str = "",
    *,
    why: str = "",
    better: Better = "",
    seed: int = 0,
) -> Figure:
    """Return a mean with its bootstrap interval."""
    return _figure(name, values, unit, np.mean, "bootstrap", why, better, seed=seed)


def median_figure(
    name: str, values: Sequence[float], unit: str = "", *, why: str = "", better: Better = ""
) -> Figure:
    """Return a median with its bootstrap interval; for times, which have outliers."""
    return _figure(name, values, unit, np.median, "median, bootstrap", why, better, draws=500)


def _figure(
    name: str,
    values: Sequence[float],
    unit: str,
    statistic: Callable[[Any], Any],
    how: str,
    why: str,
    better: Better,
    **drawing: int,
) -> Figure:
    if not len(values):
        return Figure(name, None, unit, n=0, why=why or "nothing could be measured", better=better)
    low, high = bootstrap(values, lambda rows: float(statistic(rows)), **drawing)
    if math.isnan(low):
        return Figure(name, float(statistic(values)), unit, n=len(values), why=why, better=better)
    note = join_notes(why, how)
    return Figure(name, float(statistic(values)), unit, low, high, len(values), note, better)


def share_figure(
    name: str, successes: int, n: int, *, why: str = "", better: Better = ""
) -> Figure:
    """Return a share with Wilson's interval."""
    if n == 0:
        return Figure(name, None, "%", n=0, why=why or "nothing could be measured", better=better)
    low, high = wilson(successes, n)
    return Figure(name, successes / n, "%", low, high, n, join_notes(why, "Wilson"), better)


Bounds = tuple[list[float], list[float], list[float]]  # of a series: y, low, high


def share_bounds(successes: Sequence[int], n: int) -> Bounds:
    """Return shares of n with Wilson's intervals."""
    ends = [wilson(count, n) for count in successes]
    return [count / n for count in successes], [end[0] for end in ends], [end[1] for end in ends]


def mean_bounds(values: Sequence[Sequence[float]]) -> Bounds:
    """Return the mean of each set of values with bootstrap intervals; a single value has none."""
    means, lows, highs = [], [], []
    for group in values:
        mean = float(np.mean(group)) if len(group) else math.nan
        low, high = bootstrap(group, lambda rows: float(rows.mean()), draws=1000)
        means.append(mean)
        lows.append(mean if math.isnan(low) else low)
        highs.append(mean if math.isnan(high) else high)
    return means, lows, highs


def join_notes(why: str, how: str) -> str:
    """Join the meaning of a figure and the method of its interval."""
    return f"{why}; {how}" if why else how


def auc(positives: ArrayLike, negatives: ArrayLike) -> float:
    """Return the area under the ROC curve: P(positive > negative), ties count half."""
    first, second = np.asarray(positives, np.float64), np.asarray(negatives, np.float64)
    if not first.size or not second.size:
        return math.nan
    difference = first[:, None] - second[None, :]
    return float((difference > 0).mean() + 0.5 * (difference == 0).mean())
