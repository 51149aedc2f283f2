"""Errors are shown in place, in words, and the page works again without a reload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from helpers.page_actions import (
    address_of,
    branch,
    finished,
    set_settings,
    start_writing,
    tokens,
    write,
)
from helpers.running_server import default_entry, running

QUESTION = "Why do leaves change color in fall?"
SMALL: dict[str, Any] = {"memory": 64 << 20, "threads": 1}


def test_a_bad_setting_is_said_beside_its_field(page: Page, expected_errors: list[str]) -> None:
    expected_errors.append("400")
    set_settings(page, temperature=-3)
    start_writing(page, QUESTION)
    fault = page.locator("#fault")
    expect(fault).to_contain_text("Temperature must be >= 0, got -3.0")
    beside = page.locator("#set-temperature-fault")
    expect(beside).to_contain_text("must be >= 0")
    page.locator("#set-temperature").fill("0.5")
    page.locator("#set-temperature").press("Tab")
    expect(fault).to_have_count(0)
    page.locator("#write").click()
    expect(tokens(page).first).to_be_visible()


def test_a_prompt_too_long_is_refused_and_a_full_context_is_named(
    window: Any, small_default: Path
) -> None:
    with running([default_entry(small_default, context=96, **SMALL)], drain=0.1) as result:
        page = window.visit(result.url)
        page.get_by_role("button", name="Plain").click()
        page.locator("#prompt").fill("word " * 200)
        page.locator("#write").click()
        expect(page.locator("#fault")).to_contain_text("96")
        page.get_by_role("button", name="Close").click()
        write(page, "word " * 60, max_tokens=200, temperature=0, end=False)
        expect(page.locator("#ending")).to_contain_text("The context window is full")
        assert branch(page)["finish_reason"] == "context"
        assert page.locator("#text .t").count() == 96


def test_a_server_that_goes_and_comes_back(window: Any, small_default: Path) -> None:
    with running([default_entry(small_default, **SMALL)], drain=0.1) as result:
        page = window.visit(result.url)
        write(page, QUESTION, mode="chat", max_tokens=8, seed=7)
        words = tokens(page).all_text_contents()
        port = int(result.url.rpartition(":")[2])
    page.locator("#go-on").click()
    expect(page.locator("#fault")).to_contain_text("The server does not answer")
    expect(page.get_by_text("Trying again every second")).to_be_visible()
    assert tokens(page).all_text_contents() == words  # what was there stays
    with running([default_entry(small_default, **SMALL)], port=port, drain=0.1):
        expect(page.get_by_text("Trying again every second")).to_have_count(0)
        expect(page.locator("#fault")).to_have_count(0)
        write(page, QUESTION, mode="chat", max_tokens=8, seed=7)
        assert tokens(page).all_text_contents() == words  # the same seed, and the same text


def test_a_restart_with_stored_texts_and_a_reload_keep_the_text_and_undo(
    window: Any, small_default: Path, tmp_path: Path
) -> None:
    entries = [default_entry(small_default, **SMALL)]
    with running(entries, state=tmp_path / "state", drain=0.1) as result:
        page = window.visit(result.url)
        write(page, QUESTION, mode="chat", max_tokens=8, seed=7, end=False)
        first = branch(page)
        tokens(page).nth(2).click()
        page.locator("#side-panel .candidate:not(.picked)").first.click()
        expect(page.locator("#text .t.chosen")).to_have_count(1)
        finished(page)
        second = branch(page)
        path = f"{result.url}/v1/tree/sessions/{second['session']}"
        for _ in range(100):  # the page stores its view in the background
            view = page.request.get(path).json()["view"]
            if view.get("current") == second["id"] and len(view["history"]["done"]) == 2:
                break
            page.wait_for_timeout(100)
        port = int(result.url.rpartition(":")[2])
    text = page.locator("#text")
    with running(entries, state=tmp_path / "state", port=port, drain=0.1):
        expect(page.get_by_text("Trying again every second")).to_have_count(0)
        page.locator("#go-on").click()  # in the same branch, with the same tokens
        expect(tokens(page)).to_have_count(second["length"] + 8)
        finished(page)
        expect(text).to_have_attribute("data-branch", second["id"])
        page.reload()
        expect(tokens(page)).to_have_count(second["length"] + 8)
        for _ in range(2):
            page.get_by_role("button", name="Undo").first.click()
        expect(text).to_have_attribute("data-branch", first["id"])
        expect(tokens(page)).to_have_count(8)
        page.locator("#library-button").click()
        expect(page.get_by_role("region", name="Library")).not_to_contain_text("not saved")


def test_a_server_with_a_key_asks_for_it(window: Any, small_default: Path) -> None:
    entries = [default_entry(small_default, **SMALL)]
    with running(entries, api_keys=("correct-horse",), drain=0.1) as result:
        page = window.visit(result.url)
        page.get_by_label("This server requires an API key").fill("wrong one")
        page.keyboard.press("Enter")
        expect(page.get_by_text("The key was rejected")).to_be_visible()
        page.get_by_label("This server requires an API key").fill("correct-horse")
        page.keyboard.press("Enter")
        expect(page.locator("#write")).to_be_enabled()
        write(page, QUESTION, mode="chat", max_tokens=4)
        assert tokens(page).count() == 4


def test_a_branch_that_the_server_has_lost(page: Page, expected_errors: list[str]) -> None:
    expected_errors.append("404")
    write(page, QUESTION, mode="chat", max_tokens=4, end=False)
    page.request.delete(f"{address_of(page)}/v1/tree/{branch(page)['id']}")
    page.locator("#go-on").click()
    expect(tokens(page)).to_have_count(8)  # it was created again
    finished(page)
    expect(page.locator("#fault")).to_have_count(0)
