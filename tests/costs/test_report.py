"""The full report on a tiny model: every part, the page, JSON, text, two models."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unspool
from unspool.cli.main import _exit_code
from unspool.costs import part as s
from unspool.costs.html import best_model, plot
from unspool.costs.measuring import PARTS, measure_part, model_name
from unspool.costs.part import (
    CostPart,
    Example,
    Figure,
    MeasurementPlan,
    Series,
    TextMark,
    format_number,
)  # fmt: skip
from unspool.costs.report import Comparison, Report
from unspool.costs.texts import packaged_sample, sample_texts


@pytest.fixture(scope="module")
def report(small: Any, texts: list[str]) -> Report:
    return unspool.measure_costs(small, quick=True, texts=texts, progress=False)


class _Tags(HTMLParser):
    """Every tag that was opened is closed, in order; nothing is fetched or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not any(name in ("src", "onload") for name, _ in attrs)
        assert all(value and value.startswith("#") for name, value in attrs if name == "href")
        if tag not in ("meta", "path", "circle", "rect", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("circle", "rect"):
            assert self.open.pop() == tag


def checked(page: str) -> _Tags:
    tags = _Tags()
    tags.feed(page)
    assert not tags.open and "script" not in tags.tags and "link" not in tags.tags
    return tags


def test_every_part_has_what_a_reader_needs(report: Report):
    assert [part.name for part in report.parts] == list(PARTS)
    for part in report.parts:
        assert part.title and part.formula and part.notes and part.example is not None, part.name
        assert any(figure.low is not None for figure in part.figures), part.name
        assert part.seconds > 0
        for figure in part.figures:
            if figure.low is not None and figure.high is not None:
                assert figure.value is not None and not math.isnan(figure.value), figure
                if figure.name.startswith("ECE"):
                    continue  # drawing again makes it larger: its interval may lie above it
                assert figure.low - 1e-9 <= figure.value <= figure.high + 1e-9, figure


def test_the_page_is_whole_and_stands_alone(report: Report):
    page = report.html()
    tags = checked(page)
    assert tags.tags.count("section") == len(report.parts)
    assert tags.tags.count("svg") >= 5 and "blockquote" in tags.tags
    assert report._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert repr(report).startswith(f"<Report {report.model}: waiting, ")
    assert "prefers-color-scheme:dark" in page and "nan" not in page.replace("nant", "")


def test_json_and_the_terminal_have_every_figure(report: Report):
    parsed = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert parsed["version"] == 1 and parsed["quick"] is True
    assert [part["name"] for part in parsed["parts"]] == list(PARTS)
    figure = parsed["parts"][0]["figures"][0]
    assert {"name", "value", "unit", "low", "high", "n", "why"} <= figure.keys()
    text = str(report)
    for part in report.parts:
        assert part.title in text
        assert all(figure.name in text for figure in part.figures)


def test_two_models_stand_side_by_side(report: Report):
    other = replace(report, model="another <model>")
    comparison = Comparison([report, other])
    page = comparison.html()
    checked(page)
    assert "another &lt;model&gt;" in page and "another <model>" not in page
    assert page.count("<svg") == 2 * report.html().count("<svg")
    assert "[2] another <model>" in str(comparison)
    assert len(comparison.to_dict()["reports"]) == 2
    fewer = Comparison([report, replace(other, parts=report.parts[:1])])  # parts may differ
    checked(fewer.html())
    assert report.parts[-1].title in str(fewer)


def test_the_better_model_is_the_one_whose_interval_lies_beyond():
    def figure(low: float, high: float, better: Any = "lower") -> Figure:
        return Figure("x", (low + high) / 2, "", low, high, better=better)

    assert best_model([figure(1, 2), figure(3, 4)]) == 0
    assert best_model([figure(1, 2, "higher"), figure(3, 4, "higher")]) == 1
    assert best_model([figure(1, 3), figure(2, 4)]) is None  # they overlap
    assert best_model([figure(1, 2, ""), figure(3, 4, "")]) is None  # neither way is better
    assert best_model([figure(1, 2), Figure("x", None)]) is None
    assert best_model([figure(1, 2)]) is None
    nats = [Figure("x", 1.5, "nats/token", n, n + 0.5, better="lower") for n in (1, 3)]
    assert best_model(nats) == 0 and best_model(nats, same_tokens=False) is None


def test_the_same_seed_measures_the_same(report: Report, small: Any, texts: list[str]):
    again = unspool.measure_costs(small, quick=True, parts=["loops"], texts=texts, progress=False)
    assert again.part("loops").figures == report.part("loops").figures


def test_parts_by_name_and_a_wrong_name(small: Any, texts: list[str]):
    with pytest.raises(ValueError, match="did you mean loops"):
        unspool.measure_costs(small, parts=["lops"], texts=texts)
    with pytest.raises(ValueError, match="parts is empty"):
        unspool.measure_costs(small, parts=[], texts=texts)


def test_progress_goes_from_nothing_to_all(small: Any, texts: list[str]):
    for name in ("confidence", "whole"):
        shares: list[float] = []
        measure_part(small, name, MeasurementPlan(True, 0, texts, shares.append))
        assert shares == sorted(shares) and shares[-1] == pytest.approx(1)


def test_what_cannot_be_measured_is_said_in_its_place(small_folder: Path, texts: list[str]):
    with unspool.load(small_folder, context=64, memory=8 << 20, threads=1) as lm:
        report = unspool.measure_costs(lm, quick=True, parts=["whole", "confidence"], texts=texts,
                               progress=False)  # fmt: skip
        assert report.part("confidence").figures and not report.part("whole").figures
        assert "Could not be measured: the prompt has" in str(report)
        checked(report.html())
        with pytest.raises(ValueError, match="no part could be measured; whole"):
            unspool.measure_costs(lm, quick=True, parts=["whole"], texts=texts, progress=False)


def test_on_torch_too(small_folder: Path, texts: list[str]):
    with unspool.load(small_folder, backend="torch", memory=64 << 20) as lm:
        report = unspool.measure_costs(
            lm, quick=True, parts=["waiting"], texts=texts, progress=False
        )
    part = report.part("waiting")
    weights = next(item for item in part.figures if item.name.startswith("reading weights"))
    assert weights.value is None and "everything else" in weights.why
    checked(report.html())


# -- building blocks ------------------------------------------------------------------------------


def test_a_plot_is_a_picture():
    series = [
        Series("a", [1, 10, 100], [1, 2, math.nan], [0.5, 1, 0], [1.5, 3, 0], log_x=True, plot="P"),
        Series("b", [1, 100], [-1, 0], kind="reference"),
    ]
    root = ElementTree.fromstring(plot(series))
    assert root.attrib["role"] == "img"
    assert len(root.findall("circle")) == 2  # a gap is left out
    bars = [Series(name, [64, 512], [1.0, 2.0], kind="bars") for name in ("weights", "rest")]
    rectangles = ElementTree.fromstring(plot(bars)).findall("rect")
    assert len(rectangles) == 4
    heights = [float(rectangle.attrib["height"]) for rectangle in rectangles]
    assert heights[2] == pytest.approx(2 * heights[0], abs=0.2)  # in scale, on top of each other
    first, second = rectangles[:2]
    bottom = float(second.attrib["y"]) + float(second.attrib["height"])
    assert bottom == pytest.approx(float(first.attrib["y"]), abs=0.2)


def test_many_intervals_are_bars_so_that_none_hides_another():
    def lines(count: int) -> list[Series]:
        return [Series(f"{n}", [1, 2], [n, n], [n - 1, 0], [n + 1, 9]) for n in range(count)]

    assert plot(lines(3)).count('class="band"') == 3 and "whisker" not in plot(lines(3))
    assert plot(lines(4)).count('class="whisker"') == 4 and "band" not in plot(lines(4))


def test_a_series_must_fit_together():
    with pytest.raises(ValueError, match="different lengths"):
        Series("a", [1, 2], [1])
    with pytest.raises(ValueError, match="logarithmic"):
        Series("a", [0, 2], [1, 2], log_x=True)


def test_marks_cut_an_example_into_pieces():
    example = Example(
        "one two three", [TextMark(4, 7, "b"), TextMark(0, 3, "a"), TextMark(2, 5, "over")]
    )
    pieces = [(text, mark.kind if mark else None) for text, mark in example.pieces()]
    assert pieces[0] == ("one", "a") and "".join(text for text, _ in pieces) == example.text


def test_what_a_model_writes_is_escaped():
    part = CostPart(
        "x", "T", "f", [Figure("a", 1.0)], (), Example("<script>", [TextMark(0, 8, "k")])
    )
    page = Report("m", {}, [part], 1.0).html()
    assert "<script>" not in page and "&lt;script&gt;" in page


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.256, "%", "25.6 %"), (1.0, "%", "100 %"), (12.345, "ms", "12.3 ms"), (None, "ms", "–"),
     (1234.5, "ms", "1,234 ms"), (3, "", "3"), (math.inf, "", "∞"), (math.nan, "", "–")],
)  # fmt: skip
def test_numbers_are_formatted(value: float | None, unit: str, text: str):
    assert format_number(value, unit) == text


def test_without_the_addresses_the_sample_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    sample = packaged_sample()
    assert len(sample.texts) >= 8 and all(len(text) > 1500 for text in sample.texts)
    monkeypatch.setenv("UNSPOOL_DEFAULT_DATA", str(tmp_path / "not-there"))
    with pytest.warns(unspool.errors.UnspoolWarning, match="short sample"):
        assert sample_texts().texts == sample.texts


def test_texts_of_ones_own(tmp_path: Path):
    file = tmp_path / "mine.txt"
    file.write_text("A sentence of mine. " * 200)
    assert sample_texts(str(file)).source == str(file)
    with pytest.raises(ValueError, match="longer"):
        sample_texts(["short"])


def test_the_guide(small: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any):
    """The example of docs/how-to/measure-costs.md runs."""
    guide = (Path(__file__).parents[2] / "docs/how-to/measure-costs.md").read_text("utf-8")
    monkeypatch.setattr("unspool.loading.load", lambda *names: small)
    monkeypatch.setattr("unspool.costs.measuring.sample_texts", lambda texts: packaged_sample())
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    exec(compile(block, "measure-costs.md", "exec"), {})
    assert "items answered right" in capsys.readouterr().out
    assert (tmp_path / "costs.html").exists()


# -- Intervals and areas against values worked out by hand, and against scipy ---------------------


@pytest.mark.parametrize(("successes", "n"), [(0, 8), (3, 20), (20, 20), (7, 9), (50, 1000)])
def test_wilson_is_scipys(successes: int, n: int):
    from scipy import stats  # takes seconds, in every process that collects tests

    expected = stats.binomtest(successes, n).proportion_ci(method="wilson")
    assert s.wilson(successes, n) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert s.wilson(0, 0) == (0.0, 1.0)  # of nothing it knows nothing


def test_bootstrap_of_a_mean_is_near_the_normal_interval():
    values = np.random.default_rng(3).normal(5, 2, 400)
    low, high = s.bootstrap(values, lambda rows: float(rows.mean()))
    reach = 1.96 * values.std(ddof=1) / math.sqrt(len(values))
    assert low == pytest.approx(values.mean() - reach, abs=0.06)
    assert high == pytest.approx(values.mean() + reach, abs=0.06)
    assert (low, high) == s.bootstrap(values, lambda rows: float(rows.mean()))
    assert all(math.isnan(end) for end in s.bootstrap([1.0], lambda rows: float(rows.mean())))


def test_bootstrap_means_of_columns_are_those_of_each_column():
    rows = np.random.default_rng(1).normal(size=(30, 3))
    low, high = s.bootstrap_means(rows, seed=5)
    for column in range(3):
        expected = s.bootstrap(rows[:, column], lambda sample: float(sample.mean()), seed=5)
        assert (low[column], high[column]) == pytest.approx(expected)
    low, high = s.bootstrap_means(np.array([[1.0, np.nan], [1.0, 2.0], [1.0, 2.0]]))  # a gap
    assert low == pytest.approx([1, 2]) and high == pytest.approx([1, 2])


def test_auc_by_hand_and_by_mann_whitney():
    from scipy import stats

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


# -- `unspool costs`: the page, the JSON file, two models, and error messages ---------------------


@pytest.fixture
def sample(tmp_path: Path, texts: list[str]) -> str:
    file = tmp_path / "sample.txt"
    file.write_text(texts[0])
    return str(file)


def test_a_report_of_two_models(small_folder: Path, sample: str, tmp_path: Path, capsys: Any):
    page = tmp_path / "both.html"
    arguments = ["costs", str(small_folder), str(small_folder), "--quick", "--parts"]
    arguments += ["confidence", "--texts", sample, "--out", str(page), "--threads", "1"]
    assert _exit_code(arguments) == 0
    output = capsys.readouterr()
    assert "items answered right" in output.out and "[2]" in output.out
    assert "both.html" in output.err and "both.json" in output.err
    assert page.read_text().startswith("<!doctype html>")
    first, second = json.loads((tmp_path / "both.json").read_text())["reports"]
    assert first["parts"][0]["figures"] == second["parts"][0]["figures"]
    assert first["machine"]["texts"] == sample


def test_json_on_standard_output(small_folder: Path, sample: str, tmp_path: Path, capsys: Any):
    arguments = ["costs", "-m", str(small_folder), "--quick", "--parts", "whole", "--texts", sample]
    arguments += ["--json", "--out", str(tmp_path / "one.json"), "--threads", "1"]
    assert _exit_code(arguments) == 0
    assert json.loads(capsys.readouterr().out)["parts"][0]["name"] == "whole"
    assert (tmp_path / "one.html").exists() and (tmp_path / "one.json").exists()


def test_a_checkpoint_of_a_run_is_named_after_its_run(tmp_path: Path, small: Any):
    small.path, before = tmp_path / "mine" / "checkpoints" / "000200", small.path
    try:
        assert model_name(small) == "mine/000200"
    finally:
        small.path = before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b", "c"], "got 3"),
        (["a", "-m", "b"], "not both"),
        (["--parts", "waitign"], "did you mean waiting"),
        (["--out", "/nowhere/at/all.html", "--parts", "loops"], "there is no folder"),
    ],
)
def test_errors_come_before_loading(arguments: list[str], message: str, capsys: Any):
    assert _exit_code(["costs", *arguments]) == 2
    assert message in capsys.readouterr().err
