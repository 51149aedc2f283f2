"""The tour: seven steps that do what they say, started by the user, and closed at any action."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from helpers.page_actions import finished, open_menu, start_writing, tokens

TITLES = ("Text becomes tokens", "One token at a time", "Candidate tokens", "Sampling",
          "Edit any token", "Look inside", "Costs")  # fmt: skip


@pytest.fixture
def first_visit(browser: Browser, empty_library: None) -> Iterator[BrowserContext]:
    """A browser without any state."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    context.add_init_script("localStorage.setItem('unspool.visited', 'true')")  # no example
    yield context
    context.close()


def visit(context: BrowserContext, address: str) -> tuple[Page, Locator]:
    page = context.new_page()
    page.goto(address)
    expect(page.locator("#write")).to_be_enabled()
    open_menu(page, "tour")
    return page, page.get_by_role("dialog", name=re.compile("|".join(TITLES)))


def apart(page: Page) -> None:
    """The card does not lie over what it speaks of."""
    page.wait_for_function(
        """() => {
            const card = document.querySelector(".tour-card")?.getBoundingClientRect();
            const ring = document.querySelector(".tour-ring")?.getBoundingClientRect();
            return card && ring && (card.left >= ring.right || card.right <= ring.left
                || card.top >= ring.bottom - 1 || card.bottom <= ring.top + 1);
        }"""
    )


@pytest.mark.parametrize(
    "size", [(1280, 800), pytest.param((360, 740), marks=pytest.mark.slow)], ids=["wide", "narrow"]
)
def test_seven_steps(first_visit: BrowserContext, address: str, size: tuple[int, int]) -> None:
    page, card = visit(first_visit, address)
    page.set_viewport_size({"width": size[0], "height": size[1]})
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    observed = []
    for number, title in enumerate(TITLES, 1):
        expect(card).to_contain_text(f"{number} of 7")
        expect(card.get_by_role("heading")).to_have_text(title)
        apart(page)
        if number in (1, 7):
            view = {1: "tokenizer", 7: "text"}[number]
            expect(page.locator(f"#view-{view}")).to_have_attribute("aria-current", "page")
        elif number == 2:
            expect(tokens(page).first).to_be_visible()
        elif number == 3:
            expect(page.locator("#side-panel")).to_contain_text("in the vocabulary")
        elif number == 4:
            page.locator("#whatif-temperature").press("ArrowRight")
            expect(page.locator(".step-outcome")).to_be_visible()  # and the tour stays open
        elif number == 5:
            expect(page.locator("#text .t.chosen")).to_have_count(1)
            expect(page.locator("#side-panel")).to_have_attribute("data-panel", "branches")
        else:
            expect(page.locator("#side-panel")).to_have_attribute("data-panel", "inside")
        words = card.locator("[aria-live] p").last.inner_text()
        assert len(words) < 180 and words.count(". ") <= 1
        observed.append(words)
        last = number == len(TITLES)
        page.get_by_role("button", name="Done" if last else "Next").click()
    expect(card).to_have_count(0)
    assert len(set(observed)) == 7 and not faults
    page.reload()
    expect(page.locator(".costs")).to_be_visible()
    expect(card).to_have_count(0)


def test_any_step_can_be_the_first(first_visit: BrowserContext, address: str) -> None:
    page, card = visit(first_visit, address)
    card.get_by_role("button", name="Go to step 6").click()
    expect(card.get_by_role("heading")).to_have_text("Look inside")
    expect(page.locator("#side-panel")).to_have_attribute("data-panel", "inside")
    card.get_by_role("button", name="Go to step 3").click()
    expect(page.locator("#side-panel")).to_contain_text("in the vocabulary")


def test_keys_and_focus(first_visit: BrowserContext, address: str) -> None:
    page, card = visit(first_visit, address)
    expect(card.get_by_role("button", name="Next")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(card).to_contain_text("2 of 7")
    expect(page.locator("#text .t").nth(1)).to_be_visible()  # it writes, and has taken the focus
    page.keyboard.press("ArrowLeft")
    expect(card).to_contain_text("1 of 7")
    expect(card.get_by_role("button", name="Back")).to_be_disabled()
    page.keyboard.press("Escape")
    expect(card).to_have_count(0)
    expect(page.locator("#view")).to_be_focused()
    open_menu(page, "tour")  # again
    expect(card).to_contain_text("1 of 7")
    card.get_by_role("button", name="End the tour").click()
    expect(card).to_have_count(0)
    assert (
        page.evaluate("import('/page/code/state.js').then((m) => m.state.settings.seed ?? null)")
        is None
    )


def test_whoever_takes_over_ends_it(first_visit: BrowserContext, address: str) -> None:
    page, card = visit(first_visit, address)
    expect(card).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(tokens(page).first).to_be_visible()
    page.locator("#prompt").click()
    expect(card).to_have_count(0)
    page.locator("#speed").fill("4")  # so that there is something to stop
    start_writing(page, "Once upon a time")
    expect(tokens(page).first).to_be_visible()
    page.locator("#stop").click()
    finished(page)


def test_the_tour_is_offered_and_not_started(browser: Browser, address: str, empty_library: None):
    """On a first visit there is a text with an open token, three examples, and the tour."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto(address)
    steps = page.get_by_role("complementary", name="First steps")
    expect(steps).to_be_visible()
    finished(page)
    expect(page.locator("#text .t.selected")).to_have_count(1)
    expect(page.locator("#side-panel .candidate").first).to_be_visible()
    examples = steps.get_by_role("group", name="Examples").get_by_role("button")
    expect(examples).to_have_count(4)  # and the tour
    expect(page.locator("#tour-card")).to_have_count(0)
    first_text = page.locator("#text").get_attribute("data-branch") or ""
    examples.nth(2).click()
    expect(page.locator("#text")).not_to_have_attribute("data-branch", first_text)
    finished(page)
    expect(steps).to_have_count(0)
    page.locator("#new").click()
    page.get_by_role("button", name="Take the tour").click()
    expect(page.locator("#tour-card")).to_contain_text("1 of 7")
    context.close()


def test_a_server_that_is_gone(first_visit: BrowserContext, address: str) -> None:
    page, card = visit(first_visit, address)
    expect(card).to_contain_text("1 of 7")
    page.route("**/v1/**", lambda route: route.abort())
    page.get_by_role("button", name="Next").click()
    expect(card.get_by_role("alert")).to_contain_text("The server does not answer")
    page.unroute("**/v1/**")
    card.get_by_role("button", name="Try again").click()
    expect(card.get_by_role("alert")).to_have_count(0)
    expect(tokens(page).first).to_be_visible()
    page.keyboard.press("Escape")
    expect(card).to_have_count(0)
