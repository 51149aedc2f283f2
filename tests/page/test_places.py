"""The places of the page: addresses, the library, and what must not be lost or left unclear."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from helpers.page_actions import (
    branch,
    finished,
    next_frames,
    open_panel,
    open_view,
    open_write,
    set_settings,
    start_writing,
    text,
    tokens,
    until,
    write,
)
from unspool.server.tree.branch_json import branch_store

QUESTION = "Why do leaves change color in fall?"


def shown_branch(page: Page) -> str:
    return page.locator("#text").get_attribute("data-branch") or ""


def lose_all_branches(server: Any) -> None:
    """As a server that was killed and started again without --state."""
    store = branch_store(server.state)
    for item in list(store.all.values()):
        store._delete(item, 0.0)
    store.deleted.clear()
    store.sessions.clear()


# -- addresses ----------------------------------------------------------------------------------


def test_each_view_and_each_text_has_an_address(page: Page) -> None:
    write(page, "One", max_tokens=2, seed=1)
    first = shown_branch(page)
    assert f"text={first}" in page.url and "view=" not in page.url
    write(page, "Two", max_tokens=2, seed=1)
    second = shown_branch(page)
    open_view(page, "Search")
    assert "view=search" in page.url
    open_view(page, "Tokenizer")
    page.go_back()
    expect(page.get_by_role("region", name="Search", exact=True)).to_be_visible()
    page.go_back()
    expect(page.get_by_role("region", name="Compare settings")).to_be_visible()
    page.go_back()
    expect(page.locator("#text")).to_have_attribute("data-branch", second)
    page.go_back()  # New
    page.go_back()
    expect(page.locator("#text")).to_have_attribute("data-branch", first)
    page.go_forward()
    page.go_forward()
    expect(page.locator("#text")).to_have_attribute("data-branch", second)
    page.reload()
    expect(page.locator("#text")).to_have_attribute("data-branch", second)
    assert "One" not in page.locator("#text").inner_text()


def test_a_reload_keeps_undo(page: Page) -> None:
    write(page, "Once upon a time", max_tokens=4, seed=1)
    first = shown_branch(page)
    tokens(page).nth(2).click()
    page.locator("#side-panel .candidate:not(.picked)").first.click()
    expect(page.locator("#text")).not_to_have_attribute("data-branch", first)
    finished(page)
    second, session = shown_branch(page), branch(page)["session"]
    path = f"{page.url.split('?')[0]}v1/tree/sessions/{session}"
    for _ in range(100):
        saved = page.request.get(path).json()["view"]
        if saved.get("current") == second and len(saved["history"]["done"]) == 2:
            break
        page.wait_for_timeout(100)
    page.reload()
    expect(page.locator("#text")).to_have_attribute("data-branch", second)
    page.get_by_role("button", name="Undo").first.click()
    expect(page.locator("#text")).to_have_attribute("data-branch", first)
    page.get_by_role("button", name="Redo").first.click()
    expect(page.locator("#text")).to_have_attribute("data-branch", second)


def test_a_new_tab_shows_the_latest_text(page: Page, address: str) -> None:
    write(page, "The latest", max_tokens=3, seed=1)
    other = page.context.new_page()
    other.goto(address)
    expect(other.locator("#text")).to_have_attribute("data-branch", shown_branch(page))
    expect(other.locator("#text")).to_contain_text("The latest")
    other.close()


def test_an_address_with_an_unknown_model_says_so(page: Page, address: str) -> None:
    page.goto(f"{address}?model=nope")
    notice = page.get_by_role("alert").filter(has_text="nope")
    expect(notice).to_contain_text("this server does not have: nope")
    expect(notice).to_contain_text("is in use")
    page.wait_for_timeout(200)  # other models may still be found
    notice.get_by_role("button", name="Close").click()
    expect(notice).to_have_count(0)


# -- the library --------------------------------------------------------------------------------


def test_the_library_keeps_every_text(page: Page) -> None:
    write(page, "Apples are red", max_tokens=3, seed=1)
    apples = shown_branch(page)
    write(page, "Bananas are yellow", max_tokens=3, seed=1)
    page.locator("#library-button").click()
    library = page.get_by_role("region", name="Library")
    items = library.get_by_role("listitem")
    expect(items).to_have_count(2)
    expect(library).to_contain_text(
        "These texts are not saved"
    )  # the server has no folder for them
    expect(items.first).to_contain_text("Bananas are yellow")
    library.get_by_label("Search the library").fill("apples")
    expect(items).to_have_count(1)
    items.first.locator(".library-open").click()
    expect(page.locator("#text")).to_have_attribute("data-branch", apples)

    library.get_by_role("button", name="Rename or tag").first.click()
    library.get_by_label("Title").fill("Fruit")
    library.get_by_label("Tags, with commas between").fill("food, red")
    library.get_by_role("button", name="Save").click()
    library.get_by_label("Search the library").fill("")
    expect(items).to_have_count(2)
    library.get_by_role("group", name="Tags").get_by_role("button", name="food").click()
    expect(items).to_have_count(1)
    expect(items.first).to_contain_text("Fruit")
    library.get_by_role("button", name="Duplicate Fruit").click()
    expect(items).to_have_count(2)
    library.get_by_role("button", name="Delete Fruit", exact=True).click()
    expect(items).to_have_count(1)
    expect(page.locator("#text")).to_have_attribute("data-branch", "")  # it was open
    library.get_by_role("button", name="Undo").click()
    expect(items).to_have_count(2)
    library.get_by_label("Search the library").press("Escape")
    expect(library).to_have_count(0)
    expect(page.locator("#library-button")).to_be_focused()
    page.locator("#library-button").click()  # the toolbar has room, in two rows if need be
    bar = page.locator(".bar").bounding_box()
    last = page.locator("#revise").bounding_box()
    assert bar and last and last["y"] + last["height"] <= bar["y"] + bar["height"] + 1
    library.get_by_role("button", name=re.compile("^Fruit"), exact=False).last.click()
    expect(page.locator("#text")).to_contain_text("Apples are red")


def test_a_text_of_another_view_is_kept_when_it_is_opened(page: Page) -> None:
    view = open_view(page, "Compare")
    view.get_by_label("Max tokens", exact=True).fill("3")
    view.locator("#run").click()
    expect(view.get_by_role("button", name="Stop")).to_have_count(0)
    view.get_by_role("button", name="Open column 2 in Write").click()
    expect(tokens(page).first).to_be_visible()
    page.locator("#library-button").click()
    expect(page.locator(".library-item.open")).to_have_count(1)


# -- a server that lost its branches --------------------------------------------------------------


@pytest.fixture
def expected_errors() -> list[str]:
    return ["404", "503", "ERR_FAILED", "500"]


def test_branches_that_the_server_lost_are_created_again(page: Page, server: Any) -> None:
    write(page, QUESTION, mode="chat", max_tokens=6, seed=7, end=False)
    tokens(page).nth(2).click()
    page.locator("#side-panel .candidate:not(.picked)").first.click()
    expect(page.locator("#text .t.chosen")).to_have_count(1)
    finished(page)
    before, old = text(page), shown_branch(page)
    lose_all_branches(server)
    page.locator("#go-on").click()
    expect(page.locator("#text")).not_to_have_attribute("data-branch", old)
    expect(tokens(page)).to_have_count(6 + 3 + 6)
    finished(page)
    expect(page.locator("#fault")).to_have_count(0)
    assert text(page).startswith(before)
    reply = branch(page)
    assert reply["parent"] is not None and reply["forked_at"] == 2
    assert reply["prompt"]["messages"][-1]["content"] == QUESTION
    undo = page.get_by_role("button", name="Undo").first
    undo.click()
    expect(tokens(page)).to_have_count(6 + 3)
    undo.click()
    expect(tokens(page)).to_have_count(6)  # the branch before, which was created again too


def test_the_page_rebuilds_its_branches_when_the_server_is_back(page: Page, server: Any) -> None:
    write(page, "Once upon a time", max_tokens=5, seed=7, end=False)
    before, old = text(page), shown_branch(page)
    page.route("**/v1/**", lambda route: route.abort())
    page.locator("#go-on").click()
    expect(page.get_by_role("alert").first).to_contain_text("The server does not answer")
    lose_all_branches(server)
    page.unroute("**/v1/**")
    expect(page.locator("#text")).not_to_have_attribute("data-branch", old)
    assert text(page) == before
    assert branch(page)["text"] == before
    page.locator("#go-on").click()
    expect(tokens(page)).to_have_count(10)


def test_an_error_in_a_panel_goes_away_when_the_server_is_back(page: Page) -> None:
    write(page, "Once upon a time", max_tokens=4, seed=1)
    page.route("**/look?**", lambda route: route.abort())
    tokens(page).nth(1).click()
    panel = open_panel(page, "Inside")
    expect(panel.get_by_role("alert").first).to_be_visible()
    page.unroute("**/look?**")
    expect(panel.get_by_role("alert")).to_have_count(0)
    expect(panel.locator(".inside-targets li").first).to_be_visible()


# -- writing ------------------------------------------------------------------------------------


def test_a_choice_in_ones_own_turn_keeps_the_turn(page: Page) -> None:
    write(page, "Name a color.", mode="chat", max_tokens=4, seed=1, end=False)
    page.get_by_label("Reply").fill("And one more color, please.")
    page.get_by_label("Reply").press("Enter")
    expect(page.locator("#text .t.chosen:not(.added)").first).to_be_visible()
    finished(page)
    before = branch(page)
    turn = [step for step in before["steps"] if step["chosen"]]
    place = next(step for step in turn if "one" in step["piece"])
    tokens(page).nth(place["index"]).click()
    other = page.locator("#side-panel .candidate:not(.picked)").first
    picked = int(other.get_attribute("data-token") or "")
    other.click()
    expect(page.locator("#text")).not_to_have_attribute("data-branch", before["id"])
    finished(page)
    steps = branch(page)["steps"]
    assert steps[place["index"]]["token"] == picked
    rest = [step["token"] for step in turn if step["index"] > place["index"]]
    kept = steps[place["index"] + 1 : place["index"] + 1 + len(rest)]
    assert [step["token"] for step in kept] == rest and all(step["chosen"] for step in kept)
    assert not steps[place["index"] + 1 + len(rest)]["chosen"]  # the model answers after it


def test_pasted_lines_stay_lines(page: Page) -> None:
    page.get_by_role("button", name="System").click()
    system = page.get_by_label("System message")
    system.focus()
    page.keyboard.insert_text("Be brief.\nBe kind.")
    write(page, "Hi", mode="chat", max_tokens=2, seed=1, end=False)
    assert branch(page)["prompt"]["messages"][0]["content"] == "Be brief.\nBe kind."
    page.get_by_label("Reply").focus()
    page.keyboard.insert_text("First line\nSecond line")
    page.keyboard.press("Enter")
    expect(page.locator("#text .t.chosen").first).to_be_visible()
    finished(page)
    assert "First line\nSecond line" in branch(page)["text"]


def test_the_prompt_is_near_and_escape_leaves_it(page: Page) -> None:
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    assert "#" not in page.url
    page.keyboard.press("Escape")
    expect(page.locator("#prompt")).not_to_be_focused()
    page.keyboard.press("/")
    expect(page.locator("#prompt")).to_be_focused()


def test_a_bad_setting_is_said_in_plain_words_and_not_sent(page: Page) -> None:
    set_settings(page, max_tokens=-5)
    panel = page.locator("#side-panel")
    expect(panel.get_by_role("alert")).to_have_text("Max tokens must be an integer >= 1, got -5.")
    set_settings(page, max_tokens=3, json_schema="{")
    expect(panel.get_by_role("alert")).to_contain_text("JSON schema is not valid JSON")
    page.locator("#set-json_schema").fill('{"type": "object"}')
    page.locator("#set-json_schema").press("Tab")
    expect(panel.get_by_role("alert")).to_have_count(0)
    set_settings(page, choice="yes\nno")  # one format at a time
    expect(page.locator("#set-json_schema")).to_have_value("")
    start_writing(page, "Is it? ")
    finished(page)
    assert text(page) in ("yes", "no")
    reply = page.request.post(f"{page.url.split('?')[0]}v1/tree", data={"prompt": "x", "top": -5})
    assert reply.json()["error"]["message"] == "top must be >= 0, got -5"


def test_presets_set_and_reset_the_sampler(page: Page) -> None:
    panel = open_panel(page, "Settings")
    preset = panel.get_by_label("Preset")
    preset.select_option("Creative")
    expect(page.locator("#set-temperature")).to_have_value("1.2")
    preset.select_option("Greedy")
    expect(page.locator("#set-temperature")).to_have_value("0")
    expect(page.locator("#set-min_p")).to_have_value("0.05")
    set_settings(page, temperature=0.33)
    panel.get_by_label("Name of the new preset").fill("Mine")
    panel.get_by_role("button", name="Save preset").click()
    preset.select_option("Default")
    preset.select_option("Mine")
    expect(page.locator("#set-temperature")).to_have_value("0.33")


def test_the_chip_of_a_picked_candidate_is_readable(page: Page) -> None:
    write(page, "Once upon a time", max_tokens=3, temperature=0)
    tokens(page).nth(1).click()
    page.locator("#side-panel .candidate.removed").first.click()
    finished(page)
    chip = page.locator("#side-panel .candidate.picked.removed .piece")
    expect(chip).to_have_count(1)
    accent = page.locator("#write").evaluate("(b) => getComputedStyle(b).color")
    expect(chip).to_have_css("color", accent)
    expect(chip).not_to_have_css("background-color", accent)


def test_a_long_prompt_shows_how_much_is_read(page: Page) -> None:
    set_settings(page, max_tokens=50, end=False)
    page.locator("#speed").fill("1")  # one token a second
    start_writing(page, "Once upon a time")
    expect(tokens(page).first).to_be_visible()
    page.evaluate(
        """Promise.all([import("/page/code/state.js"), import("/page/code/actions.js")]).then(
            ([{ state }, { applyEvent }]) => applyEvent(
                "prompt", { branch: state.current, computed: 512, total: 1231 }))"""
    )
    status = page.get_by_text("Reading the prompt: 512 of 1,231 tokens")
    expect(status).to_be_visible()
    expect(status).to_have_count(0)  # with the next token
    page.locator("#pause").click()
    finished(page)


# -- Explain --------------------------------------------------------------------------------------


def test_one_token_is_followed_through_the_model(page: Page) -> None:
    write(page, "Once upon a time", max_tokens=6, seed=1)
    tokens(page).nth(3).click()
    page.emulate_media(reduced_motion="reduce")  # no stage moves on by itself
    view = open_view(page, "One token")
    stage = view.locator("[data-stage]")
    step = branch(page)["steps"][3]
    for number, name in enumerate(("tokens", "embedding", "attention", "layers", "output"), 1):
        view.get_by_role("button", name=f"{number}. {name.capitalize()}").click()
        expect(stage).to_have_attribute("data-stage", name)
        if name in ("attention", "layers"):
            expect(page.locator("#text .t.lit").first).to_be_visible()
    expect(stage.locator(f"[data-token='{step['token']}']")).to_be_visible()
    view.get_by_role("button", name="4. Layers").click()
    slider = stage.get_by_role("slider")
    slider.fill("1")
    expect(stage).to_contain_text("Layer 1 of")
    view.get_by_role("button", name="6. Sampling").click()
    expect(stage).to_contain_text("is appended")
    view.locator("#play").click()  # from the start
    until(page, "document.querySelector('[data-stage]').dataset.stage !== 'sampling'")


def test_attention_of_a_token_is_drawn_over_the_text(page: Page) -> None:
    write(page, "Once upon a time", max_tokens=4, seed=1)
    view = open_view(page, "Attention")
    expect(view.locator(".inside-targets li").first).to_be_visible()
    expect(page.locator("#text-overlay .inside-arcs path").first).to_be_attached()
    open_write(page)
    expect(page.locator("#text-overlay .inside-arcs")).to_have_count(0)


def test_a_given_digit_that_a_model_replaced_is_not_shown_as_given(page: Page) -> None:
    view = open_view(page, "Sudoku")
    expect(view.get_by_role("button", name="Solve a Sudoku")).to_be_visible()
    page.evaluate(
        """async () => {
            const { adopt } = await import("/page/code/state.js");
            const { diffusion, notify } = await import("/page/code/diffusion/runs.js");
            const puzzle = "12..".padEnd(16, ".");
            const steps = ["1", "3", "4"].map((text, index) => ({ text, token: index, index }));
            adopt({ id: "made-up", length: 3, prompt: { text: puzzle, tokens: [] }, steps });
            Object.assign(diffusion, { request: { prompt: puzzle } });
            diffusion.causalRun.id = "made-up";
            notify();
        }"""
    )
    next_frames(page)
    cells = view.get_by_role("region", name="Left to right").locator(".board > *")
    expect(cells.nth(0)).to_have_class(re.compile(r"\bgiven\b"))
    expect(cells.nth(1)).not_to_have_class(re.compile(r"\bgiven\b"))
    expect(cells.nth(1)).to_have_class(re.compile(r"\breplaced\b"))
    expect(cells.nth(1)).to_have_attribute("aria-label", "Given 2, replaced by 3")
    expect(view.get_by_text("1 given digit replaced")).to_be_visible()


# -- models to download ----------------------------------------------------------------------------


def test_a_model_is_downloaded_with_progress(page: Page) -> None:
    entry = {"id": "tiny-1b", "repository": "org/tiny", "bytes": 2_000_000, "fits": True,
             "use": "tests", "licence": "MIT"}  # fmt: skip
    listed = {"data": [entry], "may_download": True, "why_not": None}
    page.route("**/v1/catalogue", lambda route: route.fulfill(json=listed))
    pending: list[Route] = []
    page.route("**/v1/catalogue/tiny-1b/pull", lambda route: pending.append(route))
    page.locator("#model").click()
    row = page.get_by_role("dialog").locator("[data-catalogue='tiny-1b']")
    expect(row).to_contain_text("2 MB")
    row.get_by_role("button", name="Download tiny-1b").click()
    expect(row.get_by_role("progressbar")).to_be_visible()
    events = (
        'event: progress\ndata: {"done": 1000000, "total": 2000000}\n\n'
        'event: error\ndata: {"error": {"message": "no space left on the disk"}}\n\n'
    )
    pending[0].fulfill(content_type="text/event-stream", body=events)
    expect(row.get_by_role("alert")).to_have_text("No space left on the disk")
    expect(row.get_by_role("button", name="Download tiny-1b")).to_be_enabled()
