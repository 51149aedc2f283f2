"""Words of a text written anew in place, doubt as a color, and revision as tracked changes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from helpers.page_actions import adopt, branch, next_frames, post, text, tokens, until
from helpers.page_colors import check_looks

SLOW = 90_000  # milliseconds: a machine that does much else at the same time
PROMPT = "Once there was"
WORDS = " a cat that sat at the mat and slept. Then it woke up, and went out into the garden."
FOUND = "#text .rewrite-list button"


@pytest.fixture
def story(page: Page) -> Page:
    """A text that is always the same, and not written by a model."""
    created = post(page, "", prompt=PROMPT, seed=1)["id"]
    post(page, f"/{created}/append", text=WORDS)
    adopt(page, [created], created)
    page.evaluate(  # as if the model had written it
        """import("/page/code/state.js").then(({ currentBranch, changed }) => {
            for (const step of currentBranch().steps) step.chosen = false;
            changed("tint");
        })"""
    )
    expect(page.locator("#text .chosen")).to_have_count(0)
    expect(tokens(page).first).to_be_visible()
    assert text(page) == WORDS
    return page


def token(page: Page, word: str) -> Locator:
    return tokens(page).filter(has_text=re.compile(rf"^ ?{word}$")).first


def reads(page: Page, words: str) -> None:
    """Wait until this is the whole text."""
    expect(page.locator("#text .tokens")).to_have_text(PROMPT + words)


def candidates(page: Page) -> Locator:
    expect(page.locator(FOUND).first).to_be_visible(timeout=SLOW)
    return page.locator(FOUND)


def mark(page: Page, first: str, last: str) -> None:
    """With the mouse, from one word to another."""
    next_frames(page)
    begin, end = token(page, first).bounding_box(), token(page, last).bounding_box()
    assert begin and end
    page.mouse.move(begin["x"] + begin["width"] / 2, begin["y"] + begin["height"] / 2)
    page.mouse.down()
    page.mouse.move(end["x"] + end["width"] - 1, end["y"] + end["height"] / 2, steps=4)
    page.mouse.up()
    expect(page.locator("#rewrite")).to_be_visible()


def test_a_part_is_written_anew_and_the_rest_stays(story: Page) -> None:
    before = branch(story)["id"]
    mark(story, "that", "sat")
    assert story.locator("#text .in-part").all_text_contents() == [" that", " sat"]
    story.locator("#rewrite").click()
    result = candidates(story)
    assert 2 <= result.count() <= 9
    now = result.filter(has_text="current")
    expect(now).to_have_count(1)
    expect(now).to_be_disabled()
    other = story.locator(f"{FOUND}:not([disabled])").first
    words = other.locator(".rewrite-words").inner_text()
    other.click()
    expect(story.locator("#text")).not_to_have_attribute("data-branch", before)
    head, rest = WORDS.split(" that sat")
    reads(story, f"{head} {words}{rest}")
    story.locator("#text").press("Control+z")
    expect(story.locator("#text")).to_have_attribute("data-branch", before)
    reads(story, WORDS)
    story.locator("#text").press("Control+Shift+z")
    expect(story.locator("#text")).not_to_have_attribute("data-branch", before)
    reads(story, f"{head} {words}{rest}")


def test_by_keys_alone_and_the_color_of_doubt(story: Page) -> None:
    token(story, "mat").click()
    story.locator("#text").focus()
    story.keyboard.press("Shift+ArrowRight")
    expect(story.locator("#text .in-part")).to_have_text([" mat", " and"])
    story.keyboard.press("Escape")
    expect(story.locator("#text .in-part")).to_have_count(0)
    story.keyboard.press("r")  # the selected token alone
    expect(story.locator("#text .in-part")).to_have_text([" and"])
    candidates(story)
    until(story, "document.activeElement.closest('.rewrite-list') !== null")
    story.keyboard.press("ArrowDown")
    story.keyboard.press("Escape")
    expect(story.locator(".rewrite")).to_have_count(0)
    reads(story, WORDS)
    until(story, "document.activeElement.id === 'text'")
    story.evaluate(  # as a finger selects
        """() => {
            const own = document.querySelectorAll("#text .t:not(.prompt)");
            document.getSelection().setBaseAndExtent(
                document.querySelector("#text .t").firstChild, 0, own[1].firstChild, 3);
        }"""
    )
    expect(story.locator("#text .in-part")).to_have_text(["Once", " there", " was", " a", " cat"])
    # Doubt is a color.
    doubts = [0.0, 9.0, *[1.0] * (tokens(story).count() - 2)]
    story.route("**/doubt", lambda route: route.fulfill(json={"doubts": doubts}))
    story.locator("#tint").select_option("doubt")
    expect(story.locator(".tint-choice .scale")).to_contain_text("doubtful")
    expect(tokens(story).nth(1)).to_have_class(re.compile(r"tint-[3-9]"))
    assert "tint-" not in (tokens(story).first.get_attribute("class") or "")


CHAT = [
    {"role": "user", "content": "A dog and a ___ sat there."},
    {"role": "assistant", "content": "Yes, they sat there."},
    {"role": "user", "content": "What did they see?"},
]


@pytest.fixture
def chat(page: Page) -> Page:
    created = post(page, "", messages=CHAT, seed=1)["id"]
    post(page, f"/{created}/append", text="They saw a cat.")
    adopt(page, [created], created)
    expect(tokens(page).first).to_be_visible()
    return page


def test_words_of_the_prompt_are_written_anew_and_a_gap_is_filled(chat: Page) -> None:
    before = branch(chat)
    prompt_token = chat.locator("#text .t.prompt", has_text=re.compile("^ they$")).last
    prompt_token.click()
    chat.locator("#text").focus()
    chat.keyboard.press("r")
    expect(chat.locator("#text .in-part")).to_have_text([" they"])
    result = candidates(chat)
    expect(result.filter(has_text="current")).to_have_text(re.compile("they"))
    other = chat.locator(f"{FOUND}:not([disabled])").first
    words = other.locator(".rewrite-words").inner_text()
    other.click()
    expect(chat.locator("#text")).not_to_have_attribute("data-branch", before["id"])
    expect(chat.locator("#text .unscored")).to_have_count(0)
    messages = branch(chat)["prompt"]["messages"]
    assert messages[2]["content"] == f"What did {words} see?" and messages[:2] == CHAT[:2]
    assert branch(chat)["text"] == before["text"]
    # A gap is filled at one click, and its underscores are no candidate.
    chat.locator("#fill-gap").click()
    result = candidates(chat)
    expect(result.filter(has_text="current")).to_have_count(0)
    words = result.first.locator(".rewrite-words").inner_text()
    assert "_" not in words
    result.first.click()
    expect(chat.locator("#fill-gap")).to_have_count(0)
    assert branch(chat)["prompt"]["messages"][0]["content"] == f"A dog and a {words} sat there."
    # Words of several messages are not one span.
    chat.evaluate(
        """() => {
            const all = [...document.querySelectorAll("#text .t:not(.added)")];
            document.getSelection().setBaseAndExtent(
                all[0].firstChild, 0, all.at(-1).firstChild, 1);
        }"""
    )
    expect(chat.locator("#text .in-part")).to_have_count(0)


def test_a_span_is_rewritten_by_an_instruction(story: Page) -> None:
    requests = list[Any]()

    def answer(route: Route) -> None:
        requests.append(route.request.post_data_json)
        texts = ["that lay", " that lay ", "stretched out"]
        choices = [{"message": {"content": text}} for text in texts]
        route.fulfill(json={"choices": choices})

    story.route("**/v1/chat/completions", answer)
    mark(story, "that", "sat")
    field = story.get_by_label("Instruction for the span")
    field.fill("calmer")
    field.press("Enter")
    words = candidates(story).locator(".rewrite-words")
    expect(words).to_have_text(["that lay", "stretched out"])  # each once
    (request,) = requests
    content = request["messages"][0]["content"]
    assert "calmer" in content and "that sat" in content and request["n"] == 3
    candidates(story).last.click()
    reads(story, WORDS.replace(" that sat", " stretched out"))
    story.locator("#text").press("Control+z")
    reads(story, WORDS)


CHANGES = [("at", "on", 0.9), ("slept", "fell asleep", 0.6), ("it", "he", 0.4)]


def proposals(page: Page) -> list[dict[str, Any]]:
    pieces = [step["text"] for step in branch(page)["steps"]]
    result = []
    for old, new, chance in CHANGES:
        begin = WORDS.index(f" {old}")
        first = next(n for n in range(len(pieces)) if len("".join(pieces[: n + 1])) > begin)
        last = first
        while "".join(pieces[first:last]) != f" {old}":
            last += 1
        words = {"old": old, "new": new, "text": f" {new}", "probability": chance}
        result.append({"first": first, "last": last, **words})
    return result


def proposed(page: Page) -> Locator:
    """Proposals that are always the same, as the server would send them."""
    events = [("proposal", {"looked": n + 1, **item}) for n, item in enumerate(proposals(page))]
    events.append(("done", {"looked": 3, "proposals": 3}))
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
    page.route("**/revise", lambda route: route.fulfill(
        status=200, content_type="text/event-stream", body=body))  # fmt: skip
    page.locator("#revise").click()
    panel = page.get_by_role("region", name="Revision")
    expect(panel.get_by_text("3 proposed edits")).to_be_visible()
    return panel


def test_changes_are_accepted_rejected_and_undone(story: Page) -> None:
    panel = proposed(story)
    struck = story.locator("#text .struck")
    expect(struck).to_have_text([" at", " slept", " it"])
    assert [s.get_attribute("data-new") for s in struck.all()] == ["on", "fell asleep", "he"]
    panel.get_by_role("button", name="Accept “slept” to “fell asleep”").click()
    expect(panel.get_by_text("2 proposed edits")).to_be_visible()
    reads(story, WORDS.replace("slept", "fell asleep"))
    expect(struck).to_have_text([" at", " it"])  # the one behind has moved
    panel.get_by_role("button", name="Reject “at” to “on”").click()
    expect(struck).to_have_text([" it"])
    panel.get_by_role("button", name="Accept “it” to “he”").click()
    expect(panel).to_have_count(0)
    reads(story, WORDS.replace("slept", "fell asleep").replace("Then it", "Then he"))
    story.locator("#text").press("Control+z")
    expect(struck).to_have_text([" it"])
    story.locator("#text").press("Control+z")
    expect(struck).to_have_text([" at", " slept", " it"])
    reads(story, WORDS)
    # All of them.
    story.locator("#text .struck").nth(1).click()  # a tap is about the change
    expect(panel.locator("li.current-change")).to_have_text(re.compile("slept"))
    panel.get_by_role("button", name="Accept all").click()
    expect(panel).to_have_count(0)
    changed = WORDS.replace("sat at", "sat on").replace("slept", "fell asleep")
    reads(story, changed.replace("Then it", "Then he"))


def test_proposals_of_the_model_itself(story: Page) -> None:
    """Proposals are about words of the text, and can be stopped."""
    story.locator("#revise").click()
    panel = story.get_by_role("region", name="Revision")
    expect(panel.get_by_role("status")).to_contain_text(re.compile(r"[1-9]\d* of up to|checked"),
                                                        timeout=SLOW)  # fmt: skip
    enough = panel.get_by_role("button", name="Stop")
    if enough.is_visible():
        enough.click()
    expect(enough).to_have_count(0)
    for item in panel.locator("del").all_text_contents():
        assert item in WORDS


def test_looks(story: Page) -> None:
    proposed(story)
    token(story, "garden").click()
    story.locator("#text").press("Escape")
    check_looks(story, "revision")
    story.set_viewport_size({"width": 1280, "height": 800})
    story.get_by_role("button", name="Close the revision").click()
    expect(story.get_by_role("region", name="Revision")).to_have_count(0)
    mark(story, "that", "sat")
    story.locator("#rewrite").click()
    candidates(story)
    check_looks(story, "rewrite")
