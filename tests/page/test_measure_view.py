"""Measure: the costs report measured from the page, kept, compared, and opened from a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

import unspool
from helpers.page_actions import open_view, until
from helpers.page_colors import check_looks
from helpers.running_server import Running, running, settled
from helpers.word_model import save_worded
from unspool.costs import measuring, stored
from unspool.costs.part import CostPart, Example, Figure, Series, TextMark
from unspool.costs.report import Comparison, Report
from unspool.costs.texts import packaged_sample
from unspool.server.runtime.registry import ModelEntry

SLOW = 60_000  # milliseconds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = save_worded(tmp_path_factory.mktemp("small"))
    kept = tmp_path_factory.mktemp("cache")
    entry = ModelEntry("small", lambda: unspool.load(folder, memory=32 << 20, threads=1), 1 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "cache_folder", lambda: kept)
        patch.setattr(measuring, "sample_texts", lambda given: packaged_sample())
        with running([entry]) as result:
            yield result


@pytest.fixture
def view(page: Page) -> Locator:
    result = open_view(page, "Cost report")
    expect(result.get_by_label("calibration")).to_be_visible()
    return result


def choose(view: Locator, *parts: str) -> None:
    for box in view.get_by_role("checkbox").all():
        box.set_checked(box.get_attribute("name") in parts)


def make_report(name: str, level: float) -> Report:
    """A report with everything that can be in one."""
    lengths, values = [8, 64, 512], [level, level / 2, level / 4]
    bounds = [value * 0.9 for value in values], [value * 1.1 for value in values]
    series = [
        Series("measured", lengths, values, *bounds, "tokens", "ms", "A line", log_x=True),
        Series("possible", lengths, [0.1] * 3, plot="A line", log_x=True, kind="reference"),
        *(Series(kind, [1, 2], [level, 1], plot="Bars", kind="bars") for kind in ("one", "two")),
    ]  # fmt: skip
    figures = [
        Figure("per token", level, "ms", level * 0.9, level * 1.1, 12, "median", "lower"),
        Figure("share", 0.25, "%", 0.125, 0.5, 8),
        Figure("missing", None, why="it needs a head"),
    ]
    example = Example("🍁 It said wrong.", [TextMark(10, 15, "slip", "it was right")], "One slip")
    table = [["option", "seconds"], ["greedy", "1.00×"]]
    part = CostPart(
        "waiting", "Waiting", "ms = s · 1000", figures, series, example, ["A note."], table
    )
    return Report(name, {"processor": "any"}, [part], 1.5)


def figure(view: Locator, name: str) -> list[str]:
    row = view.locator("tr").filter(has=view.page.locator("th[scope=row]", has_text=name))
    return [" ".join(text.split()) for text in row.locator("td").all_text_contents()]


def test_a_model_is_measured_and_the_report_kept(page: Page, view: Locator, server: Running):
    choose(view, "loops", "confidence")
    view.locator("#measure-start").click()
    bar = view.get_by_role("progressbar", name="Measured")
    expect(bar).to_be_visible()
    sections = view.locator(".msr-part")
    expect(sections).to_have_count(2, timeout=SLOW)
    expect(view.locator("#measure-start")).to_be_enabled(timeout=SLOW)
    (kept,) = httpx.get(f"{server.url}/v1/costs").json()["data"]
    report = httpx.get(f"{server.url}/v1/costs/{kept['name']}").json()
    for part in report["parts"]:
        section = view.locator(f"#msr-{part['name']}")
        expect(section.locator(".msr-figures tbody tr")).to_have_count(len(part["figures"]))
        plots = {series["plot"] for series in part["series"]}
        expect(section.locator("svg")).to_have_count(len(plots))
        said = section.locator(".msr-example blockquote").first.inner_text()
        assert said.split() == part["example"]["text"].split()
    # It is there again after a reload, and can be forgotten.
    page.reload()
    view.get_by_role("button", name=f"Open {kept['name']}").click()
    expect(sections).to_have_count(2)
    view.get_by_text("1 report on this machine").click()
    view.get_by_role("button", name=f"Delete {kept['name']}").click()
    expect(sections).to_have_count(0)
    assert httpx.get(f"{server.url}/v1/costs").json()["data"] == []


def test_a_measurement_is_stopped(view: Locator, server: Running):
    view.get_by_role("button", name="Full").click()
    view.locator("#measure-start").click()
    expect(view.get_by_text("Measuring latency")).to_be_visible(timeout=SLOW)
    view.locator("#measure-stop").click()
    expect(view.get_by_text("Stopped")).to_be_visible()
    expect(view.locator("#measure-start")).to_be_enabled()
    settled(server)


def test_a_comparison_from_a_file_is_drawn_and_what_is_wrong_said(
    page: Page, view: Locator, tmp_path: Path
):
    choose(view)
    view.locator("#measure-start").click()
    expect(view.get_by_role("alert")).to_contain_text("Select at least one part")
    choose(view, "loops")
    view.locator("[name=seed]").fill("x")
    view.locator("#measure-start").click()
    expect(view.get_by_role("alert")).to_contain_text("must be an integer")
    expect(view.locator("[name=seed]")).to_have_attribute("aria-invalid", "true")
    other = tmp_path / "other.json"
    other.write_text('{"cats": 3}')
    view.locator("#measure-file").set_input_files(other)
    expect(view.get_by_role("alert")).to_contain_text("other.json is not a report")
    pair = tmp_path / "costs.json"
    pair.write_text(
        json.dumps(Comparison([make_report("slow", 9.0), make_report("quick", 2.0)]).to_dict())
    )
    view.locator("#measure-file").set_input_files(pair)
    expect(view.locator("svg")).to_have_count(4)  # drawn
    assert figure(view, "per token") == ["9 ms", "8.1 … 9.9 ms", "2 ms (better)", "1.8 … 2.2 ms"]
    assert figure(view, "share")[:2] == ["25 %", "12.5 … 50 %"]
    assert figure(view, "missing")[0] == "–"
    expect(view.locator(".msr-plots figure").first.locator(".msr-reference")).to_have_count(1)
    axes = view.locator(".msr-plots figure").evaluate_all(
        "(all) => all.map((one) => [...one.querySelectorAll('text.end')].map((t) => t.textContent))"
    )
    assert axes[0] == axes[1] and axes[2] == axes[3], "the same axis for both models"
    assert axes[0][-1] != axes[2][-1], "and another for the other plot"
    marks = view.locator(".msr-example blockquote mark")
    assert marks.all_inner_texts() == ["wrong", "wrong"]
    # The way to a part, by keys alone.
    view.locator(".msr-cards a").first.focus()
    page.keyboard.press("Enter")
    until(page, "document.activeElement.id === 'msr-waiting'")
    page.keyboard.press("Tab")
    until(page, "document.activeElement.tagName === 'BLOCKQUOTE'")
    check_looks(page, "measure")


def test_kept_reports_are_put_side_by_side(view: Locator, page: Page):
    names = [
        stored.save_report(make_report(name, level).to_dict())
        for name, level in (("a", 2.0), ("b", 9.0))
    ]
    page.reload()
    view.get_by_role("button", name=f"Open {names[0]}").click()
    expect(view.locator(".msr-figures thead th")).to_have_count(4)
    view.get_by_text("2 reports on this machine").click()
    view.get_by_role("button", name=f"Compare with {names[1]}").click()
    heads: Any = view.locator(".msr-figures thead th")
    expect(heads).to_have_count(5)
    view.get_by_text("Figures, formula and notes").click()
    assert heads.all_inner_texts() == ["measured", "a", "95 % interval", "b", "95 % interval"]
