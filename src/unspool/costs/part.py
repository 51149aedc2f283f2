"""The building blocks of a report part: figures, plotted series, an example, notes.

All parts consist of these, so that page, terminal and comparison handle every part alike. Each has
`to_dict()` for JSON.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

VOCABULARY = "vocabulary"  # key of a machine fact; nats per token need the same vocabulary


class _JsonSerializable:
    """Base of dataclasses that are written as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(cast(Any, self))}


@dataclass(frozen=True)
class Figure(_JsonSerializable):
    """One number with an optional 95 % interval.

    Attributes:
        name: What was measured; reports are compared by it.
        value: None if it could not be measured; `why` has the reason.
        unit: "ms", "%", "nats", "" ...; a share is a fraction (0.25) with the unit "%".
        n: Number of measurements.
        why: How the number and its interval were computed, or how to read it.
        better: Which direction is better, for comparisons.
    """

    name: str
    value: float | None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    n: int | None = None
    why: str = ""
    better: Literal["lower", "higher", ""] = ""

    def formatted(self) -> str:
        """Return the value with its unit."""
        return format_number(self.value, self.unit)

    def interval(self) -> str:
        """Return the interval as text, empty if there is none."""
        if self.low is None or self.high is None:
            return ""
        low = format_number(self.low, self.unit).removesuffix(self.unit).rstrip()
        return f"{low} … {format_number(self.high, self.unit)}"


@dataclass(frozen=True)
class Series(_JsonSerializable):
    """One line of a plot; series of a part with the same `plot` share one plot."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None  # of the 95 % interval, as long as y
    high: Sequence[float] | None = None
    x_label: str = ""
    y_label: str = ""
    plot: str = ""  # title of the plot
    log_x: bool = False
    kind: Literal["line", "bars", "reference"] = "line"  # reference: drawn thin and dashed

    def __post_init__(self) -> None:
        columns = (self.x, self.y, self.low, self.high)
        sizes = {len(column) for column in columns if column is not None}
        if len(sizes) != 1:
            raise ValueError(f"the series {self.name!r} has columns of different lengths")
        if self.log_x and min(self.x, default=1) <= 0:
            raise ValueError(f"the series {self.name!r} cannot have a logarithmic axis: x <= 0")


@dataclass(frozen=True)
class TextMark(_JsonSerializable):
    """A marked range of characters in an example."""

    start: int
    end: int
    kind: str  # shown in the legend; equal kinds share a colour
    title: str = ""  # tooltip


@dataclass(frozen=True)
class Example(_JsonSerializable):
    """A text that illustrates the figures. Marks do not overlap."""

    text: str
    marks: Sequence[TextMark] = ()
    caption: str = ""

    def pieces(self) -> list[tuple[str, TextMark | None]]:
        """Split the text into marked and unmarked pieces."""
        pieces: list[tuple[str, TextMark | None]] = []
        at = 0
        for mark in sorted(self.marks, key=lambda mark: mark.start):
            start, end = max(mark.start, at), min(mark.end, len(self.text))
            if start >= end:
                continue
            if start > at:
                pieces.append((self.text[at:start], None))
            pieces.append((self.text[start:end], mark))
            at = end
        return pieces + ([(self.text[at:], None)] if at < len(self.text) else [])


@dataclass(frozen=True)
class CostPart(_JsonSerializable):
    """One measured cost.

    Attributes:
        name: As in `--parts`: waiting, loops, ...
        title: One sentence about the cost.
        formula: What is computed, in plain notation.
        notes: Limits and choices of the measurement.
        table: Rows of a table (remedies and their costs); the first is the header.
    """

    name: str
    title: str
    formula: str
    figures: Sequence[Figure] = ()
    series: Sequence[Series] = ()
    example: Example | None = None
    notes: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()
    seconds: float = field(default=0.0, compare=False)  # duration of the measurement

    def figure(self, name: str) -> Figure:
        """Return the figure with this name."""
        return next(figure for figure in self.figures if figure.name == name)


def group_parts(reports: Sequence[Sequence[CostPart]]) -> list[list[CostPart]]:
    """Group parts by name, one per report; an empty one where a report does not have it."""
    names = dict.fromkeys(part.name for parts in reports for part in parts)
    grouped = []
    for name in names:
        group = [next((part for part in parts if part.name == name), None) for parts in reports]
        template = next(part for part in group if part is not None)
        grouped.append([part or CostPart(name, template.title, template.formula) for part in group])
    return grouped


def figure_names(parts: Sequence[CostPart]) -> list[str]:
    """Return the distinct figure names of all parts, in order."""
    return list(dict.fromkeys(figure.name for part in parts for figure in part.figures))


def figure_or_empty(part: CostPart, name: str) -> Figure:
    """Return a part's figure with this name, or one without a value."""
    return next((figure for figure in part.figures if figure.name == name), Figure(name, None))


def format_number(value: float | None, unit: str = "") -> str:
    """Format a number: three digits, shares as percent."""
    if value is None:
        return "–"
    if unit == "%":
        return f"{100 * value:.3g} %" if abs(value) < 1 else f"{100 * value:.0f} %"
    if not math.isfinite(value):
        return "∞" if value > 0 else "–"
    if value == int(value) and abs(value) < 1e15:
        text = f"{int(value):,}"
    else:
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def _plain(value: Any) -> Any:
    """Return a value as plain JSON types: numpy numbers too; nan becomes None."""
    if isinstance(value, _JsonSerializable):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, bool | int):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return [_plain(item) for item in value]


_T = TypeVar("_T")


def _ignore_progress(share: float) -> object:
    return None


@dataclass(frozen=True)
class MeasurementPlan:
    """Settings of a measurement.

    Attributes:
        quick: Less than a minute for all parts together, with wide intervals.
        seed: Of all random draws: the same seed measures the same texts.
        texts: Human-written texts, each of a few thousand characters.
        tell: Called with the progress of a part, 0 to 1.
        twin: A masked (bidirectional) model, if there is one.
    """

    quick: bool
    seed: int
    texts: Sequence[str]
    on_progress: Callable[[float], object] = _ignore_progress
    twin: object | None = None

    def pick(self, quick: _T, full: _T) -> _T:
        """Return the amount for a quick or for a complete measurement."""
        return quick if self.quick else full


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
