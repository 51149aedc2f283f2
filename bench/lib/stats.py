"""Statistics of repeated measurements."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def median(values: Sequence[float | None]) -> float | None:
    """Median of the values that were measured; None if there are none."""
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else None


def paired_ratio(
    numerators: Sequence[float | None], denominators: Sequence[float | None]
) -> dict[str, float] | None:
    """Median, minimum and maximum of the ratios within each round; None if no round has both."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=False) if a and b]
    if not ratios:
        return None
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def format_ratio(ratio: dict[str, float] | None) -> str:
    if not ratio:
        return "—"
    return f"{ratio['median']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})"


def spread(values: Sequence[float], form: str = ".2f") -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def percentile(values: Sequence[float], share: float) -> float | None:
    """Smallest measured value that `share` percent of the values do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share / 100 * len(values)) - 1)]


def roc_auc(scores: Any, labels: Any) -> float:
    """Probability that a positive has a higher score than a negative; a tie counts half."""
    values, positive = np.asarray(scores, float).ravel(), np.asarray(labels, bool).ravel()
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[inverse]
    num_positive = int(positive.sum())
    pairs = num_positive * (len(positive) - num_positive)
    if not pairs:
        return math.nan
    return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / pairs)


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternate(names: Sequence[str], round_number: int) -> list[str]:
    """Order of turns: the first to run changes from round to round."""
    return list(names)[:: -1 if round_number % 2 else 1]
