"""What people meet in the first minutes: the end of the text in sight, keys that are the page's,
words that wrap as words, emoji that are whole, and what can be done next said where they look."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Page, Route, expect

from helpers.page_actions import (
    branch,
    finished,
    next_frames,
    open_panel,
    open_view,
    set_settings,
    start_writing,
    text,
    tokens,
    until,
    write,
)

QUESTION = "Why do leaves change color in fall?"
FROM_END = """(() => {
    const box = document.querySelector("#text");
    return box.scrollHeight - box.scrollTop - box.clientHeight;
})()"""


def test_the_last_lines_stay_in_sight_when_the_reply_box_comes(page: Page) -> None:
    set_settings(page, max_tokens=140, seed=3, end=False)
    page.set_viewport_size({"width": 1280, "height": 560})
    start_writing(page, QUESTION)
    expect(tokens(page)).to_have_count(140, timeout=60_000)
    finished(page)
    expect(page.locator("#prompt")).to_be_visible()
    next_frames(page)
    assert page.evaluate("document.querySelector('#text').scrollTop") > 100
    assert page.evaluate(FROM_END) <= 1
    # Who has scrolled up stays there.
    page.locator("#text").evaluate("(box) => { box.scrollTop = 0; }")
    next_frames(page)
    page.locator("#one-step").click()
    expect(tokens(page)).to_have_count(141)
    page.set_viewport_size({"width": 1280, "height": 500})
    next_frames(page)

    page.locator("#text").evaluate("(box) => { box.scrollTop = 0; }")
    next_frames(page)
    page.set_viewport_size({"width": 1280, "height": 560})
    next_frames(page)
    assert page.evaluate("document.querySelector('#text').scrollTop") == 0


def test_after_enter_the_keys_are_the_pages(page: Page) -> None:
    set_settings(page, max_tokens=300, seed=3, end=False)
    page.locator("#speed").fill("4")
    start_writing(page, QUESTION)
    expect(tokens(page).nth(1)).to_be_visible()
    expect(page.locator("#text")).to_be_focused()
    page.keyboard.press("Space")
    finished(page)
    paused = tokens(page).count()
    assert page.locator("#prompt").input_value() == ""
    page.keyboard.press(".")
    expect(tokens(page)).to_have_count(paused + 1)
    finished(page)
    page.keyboard.press("Space")
    expect(page.locator("#pause")).to_be_visible()
    page.keyboard.press("s")
    finished(page)
    page.locator("#speed").fill("0")  # step by step
    page.locator("#text").focus()
    stopped = tokens(page).count()
    page.keyboard.press("Space")
    expect(tokens(page)).to_have_count(stopped + 1)
    finished(page)
    assert page.locator("#prompt").input_value() == ""
    page.keyboard.press("/")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#text")).to_be_focused()


def test_a_stop_waits_for_what_it_stops(page: Page) -> None:
    """Pressed before the server has heard of the writing, it stops the writing all the same."""
    write(page, QUESTION, max_tokens=1, seed=3, end=False)
    set_settings(page, max_tokens=300)
    page.locator("#speed").fill("4")
    pending: list[Route] = []
    page.route("**/resume", lambda route: pending.append(route))  # not answered
    page.locator("#text").focus()
    page.keyboard.press("Space")
    expect(page.locator("#pause")).to_be_visible()
    page.keyboard.press("s")
    next_frames(page)
    assert page.locator("#text").get_attribute("aria-busy") == "true"
    pending[0].continue_()
    finished(page)
    assert tokens(page).count() < 100


def test_a_words_space_makes_no_sliver_where_a_line_ends(page: Page) -> None:
    """Words of a person, so that lines wrap with any model."""
    write(page, "One", max_tokens=1, seed=3)
    page.get_by_label("Your text").fill(" word after word" * 40)
    page.get_by_role("button", name="Add").click()
    expect(page.locator("#text .t.chosen").nth(100)).to_be_visible()
    finished(page)
    rects = page.evaluate(
        """[...document.querySelectorAll("#text .t.word")].map((token) =>
            [...token.getClientRects()].map(({ width, top }) => ({ width, top })))"""
    )
    split = [parts for parts in rects if len(parts) > 1]
    assert split, "no line wrapped"
    # Editable text keeps the space at the end of a line, and no more than that.
    assert all(parts[0]["width"] < 8 < parts[-1]["width"] for parts in split)
    # Arcs and rings stand on the words.
    places = page.evaluate(
        """import("/page/code/write/pane.js").then(({ tokenBox }) =>
            [...document.querySelectorAll("#text .t.word")].map((t) => tokenBox(+t.dataset.at)))"""
    )
    assert all(place["width"] > 8 for place in places)

    looks = page.evaluate(
        """import("/page/code/lib.js").then(({ isWord }) => [
            isWord(" a", "b"), isWord(" a", "b\\n"), isWord(" a", ""), isWord("  a", "b"),
            isWord(" ", "b"), isWord("a", "b")])"""
    )
    assert looks == [True, False, False, False, False, False]


def test_emoji_of_several_tokens_are_whole_wherever_they_are_shown(page: Page) -> None:
    set_settings(page, regex="🍁🦜🍁")
    write(page, "Leaves 🍁", max_tokens=12, seed=3, regex="🍁🦜🍁")
    assert text(page).replace("·", "") == "🍁🦜🍁"
    reply = branch(page)
    assert "\ufffd" not in str(reply)
    complete = next(step for step in reply["steps"] if step["text"] == "🍁")
    assert complete["piece"] == "🍁"
    assert any(step["piece"].startswith("⟨") for step in reply["steps"])
    tokens(page).nth(complete["index"]).click()
    panel = page.locator("#side-panel")
    expect(panel.locator(".step-token")).to_have_text("🍁")
    expect(panel.locator(".candidate").nth(3)).to_be_visible()
    assert "\ufffd" not in panel.inner_text()
    # A part of a character is shown by its bytes.
    tokens(page).first.click()
    expect(panel.locator(".step-token i")).to_have_text(re.compile(r"⟨F0[ 0-9A-F]*⟩"))
    assert page.locator("#text .t.prompt").last.text_content() == "🍁"


def test_samples_that_part_within_a_character_show_its_bytes(page: Page) -> None:
    pictures = page.evaluate(
        """import("/page/code/compare/samples.js").then(({ firstSplit, grow, wordsOf }) => {
            const part = { token: 1, text: "", piece: "⟨F0 9F⟩", bytes: [0xf0, 0x9f], logprob: -1 };
            const half = { token: 2, text: "", piece: "⟨8D⟩", bytes: [0x8d], logprob: -1 };
            const leaf = { token: 3, text: "🍁", piece: "🍁", bytes: [0x81], logprob: -1 };
            const pear = { token: 4, text: "🍐", piece: "🍐", bytes: [0x90], logprob: -1 };
            const tree = grow([[part, half, leaf], [part, half, pear]], 3);
            const rows = firstSplit(tree).rows.map(({ text }) => text);
            return [wordsOf([part, half, leaf]), wordsOf(tree.steps), rows.sort()];
        })"""
    )
    assert pictures == ["🍁", "⟨F0 9F⟩⟨8D⟩", ["🍁", "🍐"]]

    write(page, "Once", max_tokens=4, seed=3)
    page.evaluate(
        """Promise.all([import("/page/code/state.js"), import("/page/code/actions.js")]).then(
            ([{ currentBranch, changed }, _]) => {
                const branch = currentBranch();
                const like = branch.steps[0];
                const at = branch.steps.length;
                like.entropy = 0.001;
                branch.steps.push(
                    { ...like, index: at, piece: "⟨F0 9F⟩", text: "", bytes: [240, 159] },
                    { ...like, index: at + 1, piece: "⟨FF⟩", text: "\ufffd\ufffd", bytes: [255] },
                );
                changed("steps");
            })"""
    )
    expect(tokens(page)).to_have_count(6)
    assert tokens(page).all_text_contents()[-2:] == ["⟨F0 9F⟩", "⟨FF⟩"]
    tokens(page).first.click()
    expect(page.locator(".step-facts")).to_contain_text("as 1 choice")  # one is no plural
    expect(page.locator(".step-facts")).not_to_contain_text("choices")


def test_settings_are_reset(page: Page) -> None:
    set_settings(page, temperature=1.5)
    panel = page.locator("#side-panel")
    panel.get_by_role("button", name="Reset", exact=True).click()
    expect(page.locator("#set-temperature")).to_have_value("0.8")

    write(page, "Once upon a time", max_tokens=8, seed=3)
    tokens(page).nth(2).click()
    summary = page.get_by_text("Try other settings")
    expect(summary).to_be_in_viewport()
    summary.click()
    slider = page.locator("#side-panel").get_by_role("slider", name="Temperature")
    expect(slider).to_be_in_viewport()
    tokens(page).nth(3).click()
    expect(slider).to_be_visible()  # it stays open from token to token

    tokens(page).nth(4).click()
    legend = page.locator(".tint-choice")
    expect(legend).to_contain_text("1 in 1,000")
    panel = open_panel(page, "Inside")
    expect(panel.get_by_label("Without the first token")).to_be_checked()
    expect(page.locator("#text .t.lit").first).to_be_visible()
    expect(legend).not_to_contain_text("1 in 1,000")
    expect(legend).to_contain_text("Attention")
    parts = "[...document.querySelectorAll('.inside-part')].map((part) => part.open)"
    assert [at for at, is_open in enumerate(page.evaluate(parts)) if is_open] == [1]
    panel.get_by_role("button", name="Open all").click()
    until(page, f"{parts}.every(Boolean)")
    panel.get_by_role("button", name="Fold all").click()
    until(page, f"!{parts}.some(Boolean)")
    open_panel(page, "Sampling")
    expect(legend).to_contain_text("1 in 1,000")


def test_compare_opens_with_an_example_that_can_be_run(page: Page) -> None:
    view = open_view(page, "Compare")
    expect(view).to_contain_text("Example:")
    view.get_by_label("Max tokens", exact=True).fill("4")
    view.locator("#run").click()
    expect(view.locator("[data-column='4'] .cmp-text .t").nth(3)).to_be_visible()
    expect(view.get_by_text("Example:")).to_have_count(0)
    expect(open_view(page, "Samples")).to_contain_text("8 samples as a tree")

    data = [{"name": name, "available": False, "why": "not here"} for name in ("gpt2", "o200k")]
    page.route("**/vocabularies", lambda route: route.fulfill(json={"data": data}))
    open_view(page, "Tokenizer")
    section = page.get_by_role("region", name="Other vocabularies")
    folded = section.get_by_text("2 others not on this machine")
    expect(folded).to_be_visible()
    expect(section.get_by_text("not here").first).not_to_be_visible()
    folded.click()
    expect(section.get_by_text("not here").first).to_be_visible()


def test_the_default_model_is_said_to_be_tiny(page: Page) -> None:
    data: list[Any] = []
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": data}))
    for is_default in (True, False):
        data[:] = [{"id": "smollm", "unspool": {"loaded": True, "default": is_default}}]
        page.reload()
        expect(page.locator(".welcome")).to_be_visible()
        if is_default:
            expect(page.locator(".welcome")).to_contain_text("a tiny demo model")
            expect(page.locator(".welcome")).to_contain_text("unspool page -m qwen3-0.6b")
        else:
            expect(page.locator(".tiny-note")).to_have_count(0)
