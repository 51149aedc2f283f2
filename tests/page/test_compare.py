"""Comparing: one prompt with several settings in columns, and many samples as a tree."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from helpers.page_actions import address_of, open_view, text, tokens

QUESTION = "Why do leaves change color in fall?"
ONLY_TEMPERATURE = {"top_k": 0, "top_p": 1, "min_p": 0}
WORD_TREE = """async () => {
  const { grow, firstSplit, distinct, depthOf, layout } =
    await import("/page/code/compare/samples.js");
  const step = (word, index) => ({ token: word.charCodeAt(0) * 100 + word.length, text: ` ${word}`,
    piece: ` ${word}`, logprob: -1 - index, probability: 0.25, finish_reason: null,
    candidates: [{ token: 1, text: " other", logprob: -2, probability: 0.1 }] });
  const samples = ["a b c", "a b d e", "a x", "a b c"].map((text) => text.split(" ").map(step));
  const measure = (text, size) => text.length * size * 0.5;
  const tree = grow(samples, 10);
  const plain = ({ steps, samples, children }) => [
    steps.map((each) => each.text).join(""), samples, children.map(plain)];
  const plan = layout(tree, { width: 700, measure, stem: "the prompt" });
  const together = grow([samples[0], samples[3]], 10);
  return {
    tree: plain(tree),
    cut: plain(grow(samples, 1)),
    split: firstSplit(tree, 1),
    together: firstSplit(together),
    distinct: [distinct(tree), distinct(together)],
    depth: [[true, true, false, true], [false, false, false, false]].map(
      (running) => depthOf(samples, running, 10)),
    leaves: plan.leaves.map((leaf) => leaf.sample).sort(),
    rows: new Set(plan.leaves.map((leaf) => leaf.y)).size,
    bands: plan.bands.map(({ x, y, width, height }) => ({ x, y, width, height })),
    size: [plan.width, plan.height],
    narrow: layout(tree, { width: 50, measure }).width,
  };
}"""


def opened(page: Page, picture: str = "Compare", tokens: int = 12) -> Locator:
    view = open_view(page, picture)
    view.locator("[name=prompt]").fill(QUESTION)
    view.get_by_label("Max tokens", exact=True).fill(str(tokens))
    return view


def column(view: Locator, number: int) -> Locator:
    return view.locator(f'[data-column="{number}"]')


def number(column: Locator, name: str) -> Locator:
    return column.locator(f'[data-number="{name}"]')


def words(part: Locator) -> str:
    return "".join(part.locator(".t").all_text_contents())


def written(view: Locator, wait: int = 30_000) -> None:
    expect(view.get_by_role("button", name="Stop", exact=True)).to_have_count(0, timeout=wait)


def api_text(page: Page, **settings: Any) -> dict[str, Any]:
    """The same question, asked without the page."""
    tree = f"{address_of(page)}/v1/tree"
    request = {"messages": [{"role": "user", "content": QUESTION}], **settings}
    started = page.request.post(tree, data=request).json()
    result: dict[str, Any] = page.request.post(f"{tree}/{started['id']}/resume", data={}).json()
    return result


def first_difference(item: list[dict[str, Any]], other: list[dict[str, Any]]) -> int:
    pairs = enumerate(zip(item, other, strict=True))
    return next(at for at, (a, b) in pairs if a["token"] != b["token"])


def readable(text: str) -> str:
    """Bytes of a character that was not finished: the page shows them, the API cannot."""
    return re.sub(r"⟨[0-9A-F ]+⟩|\ufffd+", "\ufffd", text)


def test_four_settings_are_written_side_by_side(page: Page) -> None:
    view = opened(page)
    view.locator("[name=prompt]").press("Enter")
    for item in range(1, 5):
        expect(number(column(view, item), "end")).to_have_text("max tokens", timeout=30_000)
        expect(number(column(view, item), "tokens")).to_have_text("12")
    greedy = api_text(page, temperature=0, max_tokens=12)
    wild = api_text(page, temperature=1, seed=7, max_tokens=12, **ONLY_TEMPERATURE)
    assert readable(words(column(view, 1))) == readable(greedy["text"])
    assert readable(words(column(view, 3))) == readable(wild["text"])

    parts = first_difference(wild["steps"], greedy["steps"])
    said = column(view, 3).locator("[data-parts]")
    expect(said).to_have_attribute("data-parts", str(parts))
    expect(column(view, 3).locator(".cmp-same")).to_have_count(parts)
    expect(column(view, 3).locator(".cmp-parts")).to_have_attribute("data-at", str(parts))

    surprise = -sum(step["logprob"] for step in wild["steps"]) / 12
    entropy = sum(step["entropy"] for step in wild["steps"]) / 12
    expect(number(column(view, 3), "surprise")).to_have_text(f"{surprise:.2f} nats")
    expect(number(column(view, 3), "entropy")).to_have_text(f"{entropy:.2f} nats")

    # A narrow page scrolls only inside.
    page.set_viewport_size({"width": 360, "height": 740})
    last = column(view, 4).get_by_role("button", name="Open column 4 in Write")
    last.scroll_into_view_if_needed()
    expect(last).to_be_in_viewport()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_same_settings_and_seed_give_the_same_text(page: Page) -> None:
    view = opened(page)
    for item in (4, 3):
        view.get_by_role("button", name=f"Remove column {item}").click()
    for item in (1, 2):
        view.get_by_label(f"Settings of column {item}").select_option(label="T 1.0")
    view.get_by_role("button", name="Add a column").click()
    view.get_by_label("Seed of column 3").fill("8")
    view.get_by_label("Seed of column 3").press("Enter")
    expect(column(view, 3).locator(".t").first).to_be_visible()
    written(view)
    assert words(column(view, 1)) == words(column(view, 2)) != ""
    expect(column(view, 2)).to_contain_text("The same text as column 1, all 12 tokens")
    expect(column(view, 3)).not_to_contain_text("The same text")
    assert words(column(view, 3)) != words(column(view, 1))


def test_a_bad_setting_is_said_in_its_column(page: Page, expected_errors: list[str]) -> None:
    expected_errors.append("400")
    view = opened(page, tokens=6)
    view.get_by_label("Temperature of column 2").fill("-3")
    view.get_by_label("Top-k of column 3").fill("many")
    view.locator("#run").click()
    written(view)
    expect(column(view, 2).get_by_role("alert")).to_contain_text(
        "emperature must be >= 0, got -3.0"
    )
    expect(view.get_by_label("Temperature of column 2")).to_have_attribute("aria-invalid", "true")
    expect(column(view, 3).get_by_role("alert")).to_have_text("Top-k must be a number, got “many”.")
    for item in (1, 4):
        expect(number(column(view, item), "tokens")).to_have_text("6")
    view.locator("[name=prompt]").fill(" ")
    view.locator("#run").click()
    expect(view.get_by_role("alert").first).to_have_text("Enter a prompt first.")


def test_a_token_shows_its_candidates_and_opens_in_write(page: Page) -> None:
    view = opened(page, tokens=8)
    view.locator("#run").click()
    written(view)
    displayed = words(column(view, 4))
    third = column(view, 4).locator(".t").nth(2)
    third.click()
    popover = page.get_by_role("dialog", name="Candidates for token 3")
    expect(popover.locator("tbody tr")).to_have_count(8)
    steps = api_text(
        page, temperature=1.5, top_k=5, top_p=1, min_p=0, seed=7, max_tokens=8, top=12
    )["steps"]
    best = steps[2]["candidates"][0]["logprob"]
    expect(popover.locator("tbody tr").first).to_contain_text(f"{math.exp(best) * 100:.0f} %")
    page.keyboard.press("Escape")
    expect(popover).to_have_count(0)
    expect(third).to_be_focused()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    fourth = page.get_by_role("dialog", name="Candidates for token 4")
    fourth.get_by_role("button", name="Open in Write").click()
    expect(tokens(page)).to_have_count(8)
    assert text(page) == displayed
    expect(page.locator("#text .t.selected")).to_have_text(steps[3]["text"])


def test_samples_part_as_the_model_said(page: Page) -> None:
    view = opened(page, "Samples")
    view.get_by_label("Number of samples").fill("8")
    view.get_by_label("Seed of the samples").fill("7")
    view.locator("#run").click()
    expect(view.locator(".cmp-leaf")).to_have_count(8, timeout=30_000)
    written(view)
    ids = page.evaluate("import('/page/code/compare/runs.js').then((m) => m.compare.samples.ids)")
    tree = f"{address_of(page)}/v1/tree"
    branches = [page.request.get(f"{tree}/{item}").json() for item in ids]
    assert len(branches) == 8
    pieces = [[step["token"] for step in branch["steps"]] for branch in branches]
    shared = next(at for at in range(12) if len({item[at] for item in pieces}) > 1)
    counted = Counter(item[shared] for item in pieces)
    rows = view.get_by_role("region", name="First split of the samples").locator("tbody tr")
    displayed = {
        int(row.get_attribute("data-token") or ""): int(row.get_attribute("data-count") or "")
        for row in rows.all()
    }
    assert sum(displayed.values()) == 8
    assert {token: many for token, many in displayed.items() if many} == dict(counted)

    view.locator('.cmp-leaf[data-sample="5"]').hover()
    reading = view.locator('.cmp-reading[data-sample="5"]')
    assert words(reading) == branches[4]["text"]
    assert view.locator(".cmp-tree .dim").count() > 0
    view.locator('.cmp-leaf[data-sample="5"]').click()
    page.mouse.move(0, 0)
    reading.get_by_role("button", name="Open in Write").click()
    expect(tokens(page)).to_have_count(12)
    assert text(page) == branches[4]["text"]

    view = opened(page, "Samples", tokens=6)
    view.get_by_label("Number of samples").fill("3")
    view.get_by_label("Settings of the samples").select_option(label="Greedy")
    view.get_by_label("Seed of the samples").press("Enter")
    expect(view.get_by_role("status")).to_contain_text("All 3 samples are the same", timeout=30_000)
    expect(view.locator(".cmp-leaf")).to_have_count(3)
    expect(view.get_by_role("region", name="First split of the samples")).to_have_count(0)


def test_stop_ends_all_columns_and_unused_branches_go(page: Page) -> None:
    view = opened(page, tokens=400)
    view.locator("#run").click()
    expect(column(view, 4).locator(".t").nth(3)).to_be_visible()
    view.get_by_role("button", name="Stop", exact=True).click()
    written(view)
    expect(number(column(view, 4), "end")).to_have_text("stopped")
    many = "import('/page/code/state.js').then((m) => m.state.branches.size)"
    assert page.evaluate(many) == 4
    view.get_by_label("Max tokens", exact=True).fill("2")
    view.locator("#run").click()
    expect(number(column(view, 4), "tokens")).to_have_text("2")
    written(view)
    assert page.evaluate(many) == 4


def test_samples_grow_a_tree_of_words(page: Page) -> None:
    result = page.evaluate(WORD_TREE)
    b = [" b", [0, 1, 3], [[" c", [0, 3], []], [" d e", [1], []]]]
    assert result["tree"] == [" a", [0, 1, 2, 3], [b, [" x", [2], []]]]
    assert result["cut"] == [" a", [0, 1, 2, 3], []]
    rows = [(row["text"], row["count"]) for row in result["split"]["rows"]]
    assert rows == [(" b", 3), (" x", 1), (" other", 0)]
    assert result["split"]["at"] == 1
    assert result["split"]["rows"][0]["model"] == pytest.approx(math.exp(-2))
    assert result["together"] is None
    assert result["distinct"] == [3, 1]
    assert result["depth"] == [3, 4]  # while some are written, no deeper than the shortest of them
    assert result["leaves"] == [0, 1, 2, 3]
    assert result["rows"] == 4
    width, height = result["size"]
    assert width == 700 < result["narrow"] + 700
    for band in result["bands"]:
        assert band["x"] >= 0 and band["x"] + band["width"] <= width
        assert band["y"] >= 0 and band["y"] + band["height"] <= height
    for item, other in itertools.combinations(result["bands"], 2):
        assert (
            item["x"] + item["width"] <= other["x"]
            or other["x"] + other["width"] <= item["x"]
            or item["y"] + item["height"] <= other["y"]
            or other["y"] + other["height"] <= item["y"]
        )
