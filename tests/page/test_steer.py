"""The Steer section: two texts with one seed, a kept branch with its chip, and its session file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Request, expect

from helpers.page_actions import branch, finished, open_panel, post, tokens, write
from helpers.page_colors import check_looks

PROMPT = "The old lighthouse keeper climbed the stairs every evening, and when the storm came"
AT = 3
KNOCK_OUT = {"scale": True, "site": "mlp_out", "strength": 0.0, "layers": [2]}


@pytest.fixture
def steer(page: Page) -> Locator:
    """The section, with a change chosen that removes a part of a layer."""
    write(page, PROMPT, max_tokens=8, seed=11, end=False)
    tokens(page).nth(AT).click()
    open_panel(page, "Inside")
    section = page.locator('[data-part="steer"]')
    section.locator("summary").click()
    section.locator("#steer-length").select_option("20")
    section.get_by_label("Choose a change").select_option("scale")
    section.locator("#steer-part-1").select_option("mlp_out")
    section.get_by_label("First layer").select_option(label="3")
    section.get_by_label("Last layer").select_option(label="3")
    expect(section.get_by_role("button", name="Keep as branch")).to_be_enabled()
    return section


def steered(page: Page, at: int = AT, **body: Any) -> list[dict[str, Any]]:
    """What the server writes with these changes."""
    reply = post(page, f"/{branch(page)['id']}/steer", at=at, max_tokens=20, **body)
    steps: list[dict[str, Any]] = reply["steps"]
    return steps


def visible_text(section: Locator, index: int) -> str:
    """A text of the section, without the words before it."""
    text = section.locator(".steer-text p").nth(index)
    before = text.locator(".quiet").text_content() or ""
    return (text.text_content() or "").removeprefix(before)


def spelled(steps: list[dict[str, Any]]) -> str:
    return "".join(step["piece"] for step in steps).replace("\n", "⏎")


def test_two_texts_with_one_seed(page: Page, steer: Locator) -> None:
    before = branch(page)
    plain, changed = steered(page, changes=[]), steered(page, changes=[KNOCK_OUT])
    assert [step["token"] for step in plain[:5]] == [s["token"] for s in before["steps"][AT:]]
    assert (visible_text(steer, 0), visible_text(steer, 1)) == (spelled(plain), spelled(changed))
    marked = steer.locator(".steer-text").nth(1).locator("mark").all_text_contents()
    plain_tokens = {step["token"] for step in plain}
    new = [step["piece"].strip() for step in changed if step["token"] not in plain_tokens]
    assert set(new) <= {text.strip().replace("⏎", "\n").strip() for text in marked}
    assert branch(page) == before
    # A slider that moves fast sends few requests, and the text is that of its last place.
    requests: list[Request] = []
    page.on("request", lambda r: requests.append(r) if r.url.endswith("/steer") else None)
    slider = steer.get_by_label("Factor")
    slider.focus()
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    value = float(slider.input_value())
    assert value == pytest.approx(0.3)
    expected = spelled(steered(page, changes=[{**KNOCK_OUT, "strength": value}]))
    expect(steer.locator(".steer-text p").nth(1)).to_contain_text(expected)
    assert len(requests) <= 3
    steer.get_by_role("button", name="Discard").click()
    expect(steer.locator(".steer-texts")).to_have_count(0)
    assert branch(page) == before


def test_a_kept_branch_and_its_file(page: Page, steer: Locator, tmp_path: Path) -> None:
    before, preview = branch(page), visible_text(steer, 1)
    steer.get_by_role("button", name="Keep as branch").click()
    note = page.get_by_role("group", name="Changes inside the model")
    expect(note).to_contain_text("no MLP, layer 3")
    kept = branch(page)
    assert kept["parent"] == before["id"] and spelled(kept["steps"][AT:]) == preview
    num_shown = page.locator("#text .t").count()
    page.locator("#go-on").click()
    expect(page.locator("#text .t")).not_to_have_count(num_shown)
    finished(page)
    longer = branch(page)
    assert longer["settings"]["interventions"] == kept["settings"]["interventions"] != []
    page.get_by_role("button", name="Share", exact=True).click()
    dialog = page.get_by_role("dialog", name="Share")
    with page.expect_download() as download:
        dialog.get_by_role("button", name="Save").click()
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    with page.expect_file_chooser() as chooser:
        dialog.get_by_role("button", name="Load").click()
    chooser.value.set_files(file)
    expect(dialog.locator(".share-news")).to_contain_text("all tokens are the same")
    page.keyboard.press("Escape")
    expect(note).to_contain_text("no MLP, layer 3")
    again = branch(page)
    assert again["id"] != longer["id"] and again["text"] == longer["text"]
    open_panel(page, "Branches")
    expect(page.get_by_role("group", name="Selected branch")).to_contain_text("no MLP, layer 3")
    note.get_by_role("button", name="End no MLP, layer 3 here").click()
    expect(note).to_contain_text("ended")
    assert branch(page)["text"] == longer["text"]


def test_the_looks_of_steering(page: Page, steer: Locator) -> None:
    steer.get_by_label("Add another change").select_option("token")
    steer.locator("#steer-token-2").fill(" the")
    expect(steer.get_by_role("button", name="Keep as branch")).to_be_enabled()
    check_looks(page, "steer", '[data-part="steer"]')
