"""Twins: one prompt left to right and in any order, pass by pass, and a person's own hand.

Whether a pair solves its puzzle is not asked here: `tests/model/test_shipped.py` asks that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from helpers import canvas_support
from helpers.page_actions import WIDE, open_view, until
from helpers.page_colors import check_looks
from helpers.running_server import Running, default_entry, running
from unspool.server.runtime.registry import ModelEntry

SLOW = 60_000  # milliseconds


@pytest.fixture(scope="module")
def server(small_default: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The default model, and a tiny one of blocks that comes into memory when it is asked for."""
    folder = tmp_path_factory.mktemp("masked")

    def load() -> Any:
        lm = canvas_support.with_vocabulary(folder / "model", sight="block", block=8)
        lm.end_ids = frozenset()  # so that all places get a token
        return lm

    entries = [default_entry(small_default, memory=32 << 20), ModelEntry("tiny", load, 1 << 20)]
    with running(entries) as result:
        yield result


@pytest.fixture
def view(page: Page, server: Running) -> Locator:
    """The view with a diffusion model in memory."""
    httpx.post(f"{server.url}/v1/models/tiny/load", timeout=240).raise_for_status()
    result = open_view(page, "Diffusion")
    expect(result.locator("[name=masked]")).to_have_value("tiny")
    return result


def written(view: Locator, prompt: str = "hello", length: int = 12, **fields: str) -> Locator:
    """Both have written; gives the canvas' column."""
    plain = view.get_by_role("group", name="Mode").get_by_role("button", name="Plain")
    plain.click()
    view.locator("[name=prompt]").fill(prompt)
    view.locator("[name=length]").fill(str(length))
    for name, value in fields.items():
        view.locator(f"[name={name}]").fill(value)
    view.locator("#run").click()
    column = view.get_by_role("region", name="In any order")
    expect(column.get_by_text("All places are set.")).to_be_visible(timeout=SLOW)
    expect(view.locator("#run")).to_be_enabled(timeout=SLOW)
    return column


def number(column: Locator, name: str) -> float:
    return float(column.locator(f"[data-number={name}]").inner_text().split()[0])


def test_without_a_diffusion_model_it_says_how_to_get_one(page: Page) -> None:
    """First of all: the tiny one is not in memory yet."""
    view = open_view(page, "Diffusion")
    expect(view.get_by_text("unspool train twin --kind block")).to_be_visible()
    expect(view.get_by_text("This needs a model with a mask token.")).to_be_visible()
    check_looks(page, "twins-none")
    view.locator("[name=masked]").select_option("tiny")  # known to be there, not what it can
    expect(view.get_by_text("unspool train twin --kind block")).to_have_count(0)


def test_both_are_written_and_compared(page: Page, view: Locator) -> None:
    filled = written(view, threshold="0.03")
    remaining = view.get_by_role("region", name="Left to right")
    assert number(remaining, "passes") == number(remaining, "tokens") == 12
    assert number(filled, "tokens") == 12 and number(filled, "passes") >= 2
    assert number(remaining, "surprise") >= 0
    expect(filled.locator("[data-number=surprise]")).not_to_have_text("– nats")
    expect(filled.locator(".place")).to_have_count(12)
    expect(filled.locator(".place.guess, .place.blank")).to_have_count(0)
    expect(remaining.locator(".t")).to_have_count(12)

    filled = written(view, threshold="0.9")
    slider = view.locator("#twins-pass")
    slider.fill("0")
    expect(filled.locator(".place.blank")).to_have_count(12)
    expect(view.get_by_role("region", name="Left to right").locator(".t")).to_have_count(0)
    slider.fill("1")
    expect(filled.locator(".place.did-set").first).to_be_visible()
    first = filled.locator(".place.did-set").count()
    expect(filled.get_by_role("status").first).to_contain_text(f"{12 - first} still masked")
    expect(filled.locator(".place.guess").first).to_be_visible()  # what the others would say
    expect(view.get_by_role("region", name="Left to right").locator(".t")).to_have_count(1)
    slider.press("ArrowRight")
    expect(slider).to_have_value("2")
    filled.locator("[data-place='3']").click()
    check_looks(page, "twins")


def test_a_place_is_set_by_hand_and_the_rest_goes_on_from_there(view: Locator) -> None:
    filled = written(view)
    before = filled.locator(".place").all_inner_texts()
    view.locator("#twins-pass").fill("0")
    place = filled.locator("[data-place='9']")
    place.click()
    mine = filled.get_by_placeholder("Your own text, from here on")
    mine.fill("AB")
    mine.press("Enter")
    expect(filled.locator(".place.did-hand")).to_have_text(["A", "B"])
    filled.locator("#twins-go-on").click()
    expect(filled.get_by_text("All places are set.")).to_be_visible(timeout=SLOW)
    expect(view.locator("#run")).to_be_enabled(timeout=SLOW)
    after = filled.locator(".place").all_inner_texts()
    assert after[9:11] == ["A", "B"] and after != before and len(after) == 12
    view.locator("#twins-pass").fill("1")  # an edit is a separate pass
    expect(filled.get_by_text("Edited: 2 places; 10 still masked.")).to_be_visible()


def test_a_place_is_cleared_and_another_candidate_taken(page: Page, view: Locator) -> None:
    filled = written(view, length=6)
    filled.locator("[data-place='4']").focus()
    page.keyboard.press("ArrowRight")
    until(page, "document.activeElement.dataset.place === '5'")
    page.keyboard.press("Enter")
    panel = filled.get_by_role("group", name="Place 6")
    panel.locator(".twins-candidates button[aria-pressed=false]").first.click()
    expect(filled.locator("[data-place='5'].did-hand")).to_have_count(1)
    filled.get_by_role("button", name="Undo edits").click()
    expect(filled.locator(".did-hand")).to_have_count(0)
    panel.get_by_role("button", name="Clear").click()
    expect(filled.get_by_text("1 place edited")).to_be_visible()
    filled.locator("#twins-go-on").click()
    expect(filled.get_by_text("All places are set.")).to_be_visible(timeout=SLOW)
    expect(filled.locator(".place.guess, .place.blank")).to_have_count(0)


def test_what_is_wrong_is_said_in_place(
    page: Page, view: Locator, expected_errors: list[str]
) -> None:
    expected_errors.append("400")
    view.locator("[name=length]").fill("many")
    view.locator("#run").click()
    expect(view.get_by_role("alert")).to_contain_text("must be an integer")
    view.locator("[name=length]").fill("500")
    view.locator("[name=prompt]").fill("hello")
    page.route("**/v1/tree", lambda route: route.abort())  # only the canvas is asked for
    expected_errors.append("Failed to load")
    view.locator("#run").click()
    filled = view.get_by_role("region", name="In any order")
    expect(filled.get_by_role("alert")).to_contain_text("context holds 128", timeout=SLOW)


def test_a_sudoku_is_a_board(page: Page, view: Locator) -> None:
    filled = written(view, prompt="1..4.4...1..4..1", length=16)
    board = filled.get_by_role("group", name="Sudoku, 4 by 4")
    expect(board.locator(".place")).to_have_count(16)
    expect(board.locator(".given, .replaced")).to_have_count(6)
    remaining = view.get_by_role("region", name="Left to right").get_by_role(
        "group", name="Sudoku, 4 by 4"
    )
    expect(remaining.locator(".place")).to_have_count(16)
    board.locator("[data-place='1']").click()
    mine = filled.get_by_placeholder("Your own text, from here on")
    mine.fill("2")
    mine.press("Enter")
    expect(board.locator("[data-place='1']")).to_have_text("2")
    view.locator("#twins-pass").fill("7")
    expect(board).to_be_visible()
    check_looks(page, "twins-board")


# -- puzzles -----------------------------------------------------------------------------------


def column(view: Locator, name: str) -> Locator:
    return view.get_by_role("region", name=name)


def judged(view: Locator) -> None:
    """Wait until both have answered and were judged."""
    expect(view.locator("#sudoku")).to_be_enabled(timeout=SLOW)
    for name in ("Left to right", "In any order"):
        verdict = column(view, name).locator(".twins-verdict")
        expect(verdict).to_have_text(re.compile("Solved|Not solved"), timeout=SLOW)
        expect(column(view, name).get_by_role("alert")).to_have_count(0)


PUZZLE = "import('/page/code/diffusion/runs.js').then((m) => m.diffusion.request.prompt"


def puzzle(page: Page) -> str:
    return str(page.evaluate(f"{PUZZLE})"))


def test_a_sudoku_is_one_click(page: Page, server: Running) -> None:
    """By the pair that comes with Unspool, which is in no list of this server."""
    view = open_view(page, "Sudoku")
    view.locator("#sudoku").click()
    judged(view)
    first = puzzle(page)
    assert re.fullmatch("[.1-9]{81}", first) and first.count(".") == 40
    view.get_by_text("Settings", exact=True).click()
    expect(view.locator("[name=causal]")).to_have_value("sudoku-causal")
    expect(view.locator("[name=masked]")).to_have_value("sudoku")
    for name in ("Left to right", "In any order"):
        board = column(view, name).get_by_role("group", name="Sudoku, 9 by 9")
        expect(board.locator(".place")).to_have_count(81)
    assert set(server.state.registry.ephemeral) == {"sudoku", "sudoku-causal"}
    assert list(server.state.registry.entries) == ["smollm", "tiny"]

    view.locator("[name=empty]").select_option("54")
    view.locator("#sudoku").click()
    until(page, f"{PUZZLE} !== '{first}')")
    judged(view)
    assert puzzle(page).count(".") == 54
    check_looks(page, "twins-sudoku")
    # The view of texts has its own state.
    page.set_viewport_size(WIDE)
    view = open_view(page, "Diffusion")
    expect(view.locator("[name=causal]")).to_have_value("smollm")
    expect(view.get_by_role("group", name="Sudoku, 9 by 9")).to_have_count(0)
    view = open_view(page, "Sudoku")
    expect(view.get_by_role("group", name="Sudoku, 9 by 9")).to_have_count(2)
