"""On a phone: the text comes first, and what is behind a token comes up as a sheet from below."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from helpers.page_actions import finished, next_frames, open_panel, tokens, until, write

PHONES = {"360": (360, 740), "390": (390, 844)}
# How much of the token lies between the upper edge of the text and that of the sheet.
FREE = """() => {
    const token = document.querySelector("#text .t.selected").getBoundingClientRect();
    const text = document.querySelector("#text").getBoundingClientRect();
    const sheet = document.querySelector(".side").getBoundingClientRect();
    return { above: token.top - text.top, below: sheet.top - token.bottom };
}"""


@pytest.fixture(params=["360", pytest.param("390", marks=pytest.mark.slow)])
def phone(page: Page, request: Any) -> Page:
    """A text on a phone, nothing selected."""
    write(page, "Once upon a time", max_tokens=120, seed=3, end=False)
    width, height = PHONES[request.param]
    page.set_viewport_size({"width": width, "height": height})
    page.locator("#text").press("Escape")
    expect(page.locator("#side-panel")).not_to_be_visible()
    return page


def sheet(page: Page) -> Locator:
    return page.get_by_role("complementary", name="Details of the text")


def tapped(page: Page, number: int) -> Locator:
    token = tokens(page).nth(number)
    token.click()
    expect(page.locator("#side-panel")).to_be_visible()
    next_frames(page)
    return token


def test_the_text_comes_first_and_the_controls_unfold(phone: Page) -> None:
    assert phone.evaluate("document.querySelector('#text').getBoundingClientRect().top") < 200
    expect(phone.locator("#speed")).not_to_be_visible()
    expect(phone.locator("#go-on")).to_be_visible()
    extra = phone.get_by_role("button", name="More controls")
    extra.click()
    expect(extra).to_have_attribute("aria-expanded", "true")
    for name in ("#speed", "#one-step", "#stop", "#tint", "#share", "#model", "#place-lab"):
        expect(phone.locator(name)).to_be_in_viewport()
    phone.locator("#menu-button").click()
    for name in ("#tour", "#keys", "#theme", "#help"):
        expect(phone.locator(name)).to_be_in_viewport()
    phone.keyboard.press("Escape")
    expect(phone.locator("#tour")).not_to_be_visible()
    # The four places are a bar at the bottom; the last view of a place is scrolled to.
    for place, view in (("compare", "diffusion"), ("explain", "sudoku"), ("lab", "text")):
        link = phone.locator(f"#place-{place}")
        box = link.bounding_box()
        assert box is not None and phone.viewport_size is not None
        assert box["y"] + box["height"] == pytest.approx(phone.viewport_size["height"], abs=1)
        link.click()
        phone.locator(f"#view-{view}").click()
        expect(phone.locator(f"#view-{view}")).to_be_in_viewport(ratio=1)
    phone.locator("#place-write").click()
    assert phone.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_the_sheet_of_a_token_comes_up_goes_away_and_is_pulled(phone: Page) -> None:
    for number in (2, 60, 118):
        token = tapped(phone, number)
        expect(phone.locator("#side-panel .step-token")).to_be_in_viewport()
        expect(token).to_be_in_viewport()
        free = phone.evaluate(FREE)
        assert free["above"] >= 0 and free["below"] >= 0, free
        expect(phone.locator("#side-panel")).to_be_focused()
    # What does not fit is scrolled to within the sheet.
    phone.locator("#step-drawn").scroll_into_view_if_needed()
    expect(phone.locator("#step-drawn")).to_be_in_viewport()
    assert phone.evaluate("scrollY") == 0
    assert phone.evaluate(FREE)["below"] >= 0

    panel = phone.locator("#side-panel")

    def is_gone() -> None:
        expect(panel).not_to_be_visible()

    tapped(phone, 40)
    phone.get_by_role("button", name="Close the panel").click()
    is_gone()
    expect(phone.locator("#text")).to_be_focused()
    tapped(phone, 40)
    phone.keyboard.press("Escape")
    is_gone()
    expect(phone.locator("#text .t.selected")).to_have_count(0)
    expect(phone.locator("#text")).to_be_focused()
    tapped(phone, 40)
    phone.locator(".head").click(position={"x": 60, "y": 10})
    is_gone()
    expect(phone.locator("#prompt")).to_be_visible()
    tapped(phone, 40)
    phone.get_by_role("tab", name="Token").click()  # its own tab once more
    is_gone()
    tapped(phone, 40)
    phone.get_by_label("Your own text at this position").press("Escape")
    is_gone()

    tapped(phone, 40)
    grip = phone.locator(".sheet-grip")

    def pull(down: float) -> None:
        box = grip.bounding_box()
        assert box is not None
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        phone.mouse.move(x, y)
        phone.mouse.down()
        phone.mouse.move(x, y + down / 2, steps=3)
        phone.mouse.move(x, y + down, steps=3)
        phone.mouse.up()
        next_frames(phone)

    tall = "document.querySelector('.side').offsetHeight"
    before = phone.evaluate(tall)
    pull(-60)
    assert phone.evaluate(tall) == pytest.approx(before + 60, abs=4)
    assert phone.evaluate(FREE)["below"] >= 0  # the text makes room
    pull(600)
    expect(phone.locator("#side-panel")).not_to_be_visible()

    for name in ("Settings", "Branches", "Inside"):
        panel = open_panel(phone, name)
        expect(panel).to_be_visible()
        assert phone.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    phone.keyboard.press("Escape")
    expect(phone.locator("#side-panel")).not_to_be_visible()

    tapped(phone, 60)
    open_panel(phone, "Sampling")
    for _ in range(5):  # a tap just as the sheet is drawn anew falls between two drawings
        phone.locator("#side-panel .candidate:not(.picked)").first.click()
        with suppress(AssertionError):
            expect(phone.locator("#text .t.chosen")).to_have_count(1, timeout=5000)
            break
    expect(phone.locator("#text .t.chosen")).to_have_count(1)
    finished(phone)
    expect(phone.locator("#side-panel")).to_be_visible()


def test_a_phone_held_sideways_can_scroll_to_everything(phone: Page) -> None:
    phone.set_viewport_size({"width": 740, "height": 360})
    tapped(phone, 3)
    phone.keyboard.press("Escape")
    phone.locator("#prompt").scroll_into_view_if_needed()
    expect(phone.locator("#prompt")).to_be_in_viewport()
    until(phone, "document.documentElement.scrollWidth <= innerWidth")
