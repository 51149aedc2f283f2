"""Puzzles in the Twins view: one click makes one, and the pair that comes with Unspool fills it.

Whether a pair solves its puzzle is not asked here: `tests/model/test_shipped.py` asks that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from helpers import canvas_support
from helpers.page_colors import check_looks
from helpers.running_server import Running, running
from unspool.server.runtime.registry import ModelEntry

SLOW = 60_000  # milliseconds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A tiny model that can do nothing: the puzzle pairs are in no list of this server."""
    folder = tmp_path_factory.mktemp("causal")

    def load() -> Any:
        return canvas_support.with_vocabulary(folder / "model", sight="causal", mask_id=None)

    with running([ModelEntry("tiny", load, 1 << 20)]) as result:
        yield result


@pytest.fixture
def view(page: Page) -> Locator:
    page.get_by_role("button", name="Diffusion", exact=True).click()
    return page.get_by_role("region", name="Diffusion")


def column(view: Locator, name: str) -> Locator:
    return view.get_by_role("region", name=name)


def solve(view: Locator, kind: str) -> None:
    """Choose a kind of puzzle, and wait until both have answered and were judged."""
    view.get_by_role("group", name="What to generate").get_by_role("button", name=kind).click()
    judged(view)


def judged(view: Locator) -> None:
    expect(view.locator("#twins-write")).to_be_enabled(timeout=SLOW)
    for name in ("Left to right", "In any order"):
        verdict = column(view, name).locator(".twins-verdict")
        expect(verdict).to_have_text(re.compile("Solved|Not solved"), timeout=SLOW)
        expect(column(view, name).get_by_role("alert")).to_have_count(0)


def test_a_sudoku_is_one_click(view: Locator, server: Running) -> None:
    solve(view, "Sudoku")
    prompt = view.locator("[name=prompt]").input_value()
    assert re.fullmatch("[.1-9]{81}", prompt) and prompt.count(".") == 40
    expect(view.locator("[name=causal]")).to_have_value("sudoku-causal")
    expect(view.locator("[name=masked]")).to_have_value("sudoku")
    for name in ("Left to right", "In any order"):
        board = column(view, name).get_by_role("group", name="Sudoku, 9 by 9")
        expect(board.locator(".place")).to_have_count(81)
    assert set(server.state.registry.ephemeral) == {"sudoku", "sudoku-causal"}
    assert list(server.state.registry.entries) == ["tiny"]

    first = view.locator("[name=prompt]").input_value()
    view.locator("[name=empty]").select_option("54")
    expect(view.locator("[name=prompt]")).not_to_have_value(first)
    judged(view)
    second = view.locator("[name=prompt]").input_value()
    assert second.count(".") == 54
    view.locator("#twins-another").click()
    expect(view.locator("[name=prompt]")).not_to_have_value(second)
    judged(view)


def test_back_to_a_text(view: Locator) -> None:
    before = view.locator("[name=prompt]").input_value()
    solve(view, "Sudoku")
    view.get_by_role("group", name="What to generate").get_by_role("button", name="Text").click()
    expect(view.locator("[name=prompt]")).to_have_value(before)
    expect(view.locator("[name=causal]")).to_have_value("tiny")
    expect(view.locator("#twins-another")).to_have_count(0)


def test_the_looks_of_puzzles(page: Page, view: Locator) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    solve(view, "Sudoku")
    check_looks(page, "twins-sudoku")
