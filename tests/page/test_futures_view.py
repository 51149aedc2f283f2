"""Futures: the likeliest continuations as an icicle, which can be zoomed, walked and opened."""

from __future__ import annotations

import math
import re
from typing import Any

from playwright.sync_api import Locator, Page, Route, expect

from helpers.page_actions import address_of, branch, open_panel, tokens, until, write
from helpers.page_colors import check_looks


def open_futures(page: Page, at: int | None = None) -> Locator:
    if at is not None:
        tokens(page).nth(at).click()
    open_panel(page, "Branches")
    page.locator("#show-futures").click()
    dialog = page.get_by_role("dialog", name="Futures")
    expect(dialog.get_by_role("treeitem").first).to_be_visible()
    expect(dialog.get_by_role("status")).to_have_text(re.compile(r"^\d+ tokens?$"))  # grown
    return dialog


def box(item: Locator) -> Any:
    result = item.bounding_box()
    assert result is not None
    return result


def chance(item: Locator) -> float:
    label = item.get_attribute("aria-label") or ""
    match = re.search(r"([\d.]+) % from the start", label)
    assert match, label
    return float(match[1]) / 100


def test_heights_are_probabilities_and_a_leaf_opens(page: Page) -> None:
    write(page, "Once upon a time", max_tokens=10, seed=3)
    before = branch(page)
    dialog = open_futures(page, at=2)
    view = box(dialog.get_by_role("tree"))
    items = [item for item in dialog.get_by_role("treeitem").all() if chance(item) > 0.05]
    assert items
    for item in items:  # rounded: to a pixel, and to the digits that are shown
        assert abs(box(item)["height"] / view["height"] - chance(item)) < 0.02
    path = f"{address_of(page)}/v1/tree/{before['id']}/futures"
    expected = page.request.post(
        path, data={"at": 3, "mass": 0.005, "depth": 8, "nodes": 1000}
    ).json()
    first = expected["data"][0]["children"][0]
    labels = [item.get_attribute("aria-label") or "" for item in dialog.locator(".future").all()]
    visible_text = first["text"].replace(" ", "␣")
    assert any(label.startswith(f"{visible_text}, ") for label in labels)
    # The keyboard: into the tree, to the first child as deep as it goes, and open it.
    dialog.get_by_role("treeitem").first.click()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    chosen = dialog.locator('[aria-selected="true"]')
    expect(chosen).to_be_focused()
    depth = int(chosen.get_attribute("aria-level") or 0)
    mass = chance(chosen)
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    expect(page.locator("#text")).not_to_have_attribute("data-branch", before["id"])
    opened = branch(page)
    assert opened["forked_at"] == 3 and len(opened["steps"]) == 3 + depth
    assert opened["steps"][3]["token"] == first["token"]
    logprob = sum(step["logprob"] for step in opened["steps"][3:])
    assert abs(math.exp(logprob) - mass) < 0.006  # shown with two digits
    assert [s["token"] for s in opened["steps"][:3]] == [s["token"] for s in before["steps"][:3]]
    page.keyboard.press("Control+z")
    expect(page.locator("#text")).to_have_attribute("data-branch", before["id"])
    page.keyboard.press("Control+Shift+z")
    expect(page.locator("#text")).to_have_attribute("data-branch", opened["id"])
    # A leaf of the opened branch, and undo of both: each place is shown again.
    dialog = open_futures(page, at=2)
    dialog.get_by_role("treeitem").last.click()
    page.keyboard.press("Enter")
    expect(page.locator("#text")).not_to_have_attribute("data-branch", opened["id"])
    second = branch(page)
    assert second["parent"] == opened["id"] and second["forked_at"] == 3
    for key, place in (("z", opened), ("z", before), ("Shift+z", opened), ("Shift+z", second)):
        page.locator("#text").press(f"Control+{key}")
        expect(page.locator("#text")).to_have_attribute("data-branch", place["id"])
        expect(tokens(page)).to_have_count(len(place["steps"]))


def test_zooming_and_other_limits(page: Page) -> None:
    write(page, "Once upon a time", max_tokens=6, seed=3)
    dialog = open_futures(page)
    first = dialog.get_by_role("treeitem").first
    height = box(first)["height"]
    place = box(first)
    page.mouse.move(place["x"] + 20, place["y"] + 2)
    page.mouse.wheel(0, -240)
    until(page, f"document.querySelector('.future').clientHeight > {height * 1.2}")
    page.keyboard.press("Tab")
    first.focus()
    page.keyboard.press("Home")
    until(page, f"Math.abs(document.querySelector('.future').clientHeight - {height}) < 3")
    page.keyboard.press("z")  # nothing is selected yet
    first.click()
    page.keyboard.press("z")
    total = box(dialog.get_by_role("tree"))["height"]
    until(page, f"document.querySelector('.future').clientHeight > {total * 0.7}")
    count = int((dialog.get_by_role("status").text_content() or "").split()[0])
    dialog.get_by_label("down to").select_option("0.001")
    until(page, f"parseInt(document.querySelector('.futures [role=status]').textContent) > {count}")
    expect(dialog.get_by_role("status")).to_have_text(re.compile(r"^[\d,]+ tokens"))
    page.evaluate("document.querySelector('.futures-view').dataset.old = 'true'")
    dialog.get_by_label("Probabilities").select_option("sampled")
    tree = dialog.locator(".futures-view:not([data-old])")  # a new one, for the other numbers
    expect(tree.get_by_role("treeitem").first).to_be_visible()
    expect(dialog.get_by_role("status")).to_have_text(re.compile(r"^[\d,]+ tokens"))
    until(
        page,
        """(() => {
            const tree = document.querySelector('.futures-view');
            const sum = [...tree.querySelectorAll('.future[aria-level="1"]')]
                .reduce((sum, item) => sum + item.getBoundingClientRect().height, 0);
            return 0 < sum && sum <= tree.clientHeight + 2;
        })()""",
    )
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


def test_a_failure_is_said_and_closing_ends_the_request(
    page: Page, expected_errors: list[str]
) -> None:
    expected_errors += ["ERR_FAILED", "500"]
    write(page, "Once upon a time", max_tokens=4, seed=3)
    open_panel(page, "Branches")
    fault = '{"error": {"message": "out of memory", "type": "server_error"}}'
    page.route(
        "**/futures", lambda route: route.fulfill(status=500, body=fault, content_type="text/json")
    )
    page.locator("#show-futures").click()
    dialog = page.get_by_role("dialog", name="Futures")
    expect(dialog.get_by_role("alert")).to_have_text("Out of memory")
    page.unroute("**/futures")
    dialog.get_by_role("button", name="Try again").click()
    expect(dialog.get_by_role("treeitem").first).to_be_visible()
    pending: list[Route] = []
    page.route("**/futures", lambda route: pending.append(route))  # not answered
    with page.expect_event("requestfailed") as failed:
        dialog.get_by_label("Probabilities").select_option("sampled")
        until(page, "true")
        dialog.get_by_role("button", name="Close").click()
    assert failed.value.url.endswith("/futures")
    expect(dialog).to_have_count(0)


def test_it_is_accessible_and_fits(page: Page) -> None:
    write(page, "Why do leaves change?", mode="chat", max_tokens=12, seed=7)
    dialog = open_futures(page, at=4)
    dialog.get_by_role("treeitem").first.click()
    check_looks(page, "futures", ".futures")
