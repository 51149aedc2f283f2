"""The text changed in place: typing, pasting, input methods, what follows, ghosts, and undo."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from helpers.page_actions import (
    adopt,
    branch,
    finished,
    post,
    text,
    tokens,
    until,
    use_settings,
    write,
)

PROMPT = "Once there was"
WORDS = " a cat that sat at the mat and slept.\nThen it woke up, and went out."


@pytest.fixture
def story(page: Page) -> Page:
    created = post(page, "", prompt=PROMPT, seed=1, max_tokens=8)["id"]
    post(page, f"/{created}/append", text=WORDS)
    adopt(page, [created], created)
    expect(tokens(page).first).to_be_visible()
    return page


def put_caret(page: Page, words: str) -> None:
    """After these words, which are in one token, once they are drawn."""
    code = """(words) => {
        const all = [...document.querySelectorAll("#text .t")];
        const token = all.find((t) => t.textContent.endsWith(words));
        if (!token) return false;
        token.closest(".tokens").focus();
        document.getSelection().collapse(token.firstChild, token.textContent.length);
        return true;
    }"""
    page.wait_for_function(code, arg=words)


def settled(page: Page) -> None:
    """Wait until the draft is sent and everything is scored."""
    expect(page.locator("#text .draft")).to_have_count(0)
    expect(page.locator("#text .unscored")).to_have_count(0)


def saved_text(page: Page) -> str:
    saved = branch(page)
    return "".join(t["text"] for t in saved["prompt"]["tokens"]) + saved["text"]


def test_what_is_typed_becomes_tokens_and_the_rest_is_scored(story: Page, lm: Any) -> None:
    before = branch(story)
    put_caret(story, " cat")
    story.keyboard.type("s and dogs")
    assert story.locator("#text .draft").text_content() == "s and dogs"  # shown without delay
    settled(story)
    changed = PROMPT + WORDS.replace(" cat", " cats and dogs")
    assert saved_text(story) == changed
    now = branch(story)
    assert now["parent"] == before["id"] and post(story, f"/{before['id']}/fork")["text"] == WORDS
    ids = [t["id"] for t in now["prompt"]["tokens"]] + [s["token"] for s in now["steps"]]
    expected = [p.logprob for p in lm.score(ids).positions][-len(now["steps"]) :]
    assert [s["logprob"] for s in now["steps"]] == pytest.approx(expected, abs=0.05)
    story.keyboard.type("!")  # the caret is where it was
    settled(story)
    assert saved_text(story) == changed.replace("dogs", "dogs!")
    assert branch(story)["id"] == now["id"]  # the same edit
    for _ in range(3):
        story.keyboard.press("Backspace")
    story.keyboard.press("Control+Backspace")
    settled(story)
    assert saved_text(story) == changed.replace(" dogs", " ")
    story.keyboard.press("Control+z")
    expect(story.locator("#text .tokens")).to_have_text(PROMPT + WORDS)
    story.keyboard.press("Control+Shift+z")
    expect(story.locator("#text .tokens")).not_to_have_text(PROMPT + WORDS)


def test_lines_are_split_joined_and_pasted(story: Page) -> None:
    put_caret(story, " mat")
    story.keyboard.press("Enter")
    settled(story)
    assert saved_text(story) == PROMPT + WORDS.replace(" mat", " mat\n")
    story.keyboard.press("Backspace")
    settled(story)
    assert saved_text(story) == PROMPT + WORDS
    story.evaluate(
        """() => {
            const data = new DataTransfer();
            data.setData("text/plain", ": one\\r\\ntwo\\r\\nthree");
            const event = new InputEvent("beforeinput", {
                inputType: "insertFromPaste", dataTransfer: data, bubbles: true,
                cancelable: true });
            document.activeElement.dispatchEvent(event);
        }"""
    )
    settled(story)
    assert saved_text(story) == PROMPT + WORDS.replace(" mat", " mat: one\ntwo\nthree")
    story.keyboard.press("Control+a")
    story.keyboard.type("New")
    settled(story)
    assert saved_text(story) == "New"


def test_an_input_method_changes_the_text(story: Page) -> None:
    put_caret(story, " cat")
    client = story.context.new_cdp_session(story)
    client.send("Input.imeSetComposition", {"text": "に", "selectionStart": 1, "selectionEnd": 1})
    client.send("Input.imeSetComposition", {"text": "日本", "selectionStart": 2, "selectionEnd": 2})
    client.send("Input.insertText", {"text": "日本"})
    settled(story)
    assert saved_text(story) == PROMPT + WORDS.replace(" cat", " cat日本")
    story.keyboard.press("Backspace")
    settled(story)
    assert saved_text(story) == PROMPT + WORDS.replace(" cat", " cat日")


def test_a_family_of_emoji_is_one_character(story: Page) -> None:
    put_caret(story, " cat")
    story.keyboard.insert_text(" 👨‍👩‍👧!")
    settled(story)
    family = story.locator("#text .t", has_text="👨‍👩‍👧")
    expect(family).to_have_count(1)  # of many tokens
    story.keyboard.press("Backspace")
    story.keyboard.press("Backspace")
    settled(story)
    assert saved_text(story) == PROMPT + WORDS.replace(" cat", " cat ")


def test_in_a_chat_the_template_is_neither_edited_nor_copied(page: Page) -> None:
    created = post(page, "", messages=[{"role": "user", "content": "Why is it blue?"}])["id"]
    post(page, f"/{created}/append", text="It is far away.")
    post(page, f"/{created}/append", message={"role": "user", "content": "And the sea?"})
    adopt(page, [created], created)
    put_caret(page, " blue")
    page.keyboard.type(" today")
    settled(page)
    saved = branch(page)
    assert saved["prompt"]["messages"][0]["content"] == "Why is it blue today?"
    put_caret(page, " sea")
    page.keyboard.type("s")
    settled(page)
    page.keyboard.press("Control+a")
    copied = page.evaluate(
        """() => {
            const data = new DataTransfer();
            const event = new ClipboardEvent(
                "copy", { clipboardData: data, bubbles: true, cancelable: true });
            document.querySelector("#text .tokens").dispatchEvent(event);
            return data.getData("text/plain");
        }"""
    )
    assert copied == "Why is it blue today?\n\nIt is far away.\n\nAnd the seas?"
    # Typed over everything: the turns stay, without their words.
    page.keyboard.type("Hi")
    settled(page)
    saved = branch(page)
    assert saved["prompt"]["messages"][0]["content"] == "Hi" and len(saved["turns"]) == 1


def test_words_stay_while_the_server_is_away(story: Page, expected_errors: list[str]) -> None:
    expected_errors += ["ERR_FAILED", "Failed to load"]
    away = True

    def answer(route: Route) -> None:
        route.abort() if away else route.continue_()

    story.route("**/v1/**", answer)
    put_caret(story, " cat")
    story.keyboard.type("fish")
    expect(story.get_by_text("Your words are kept and sent later")).to_be_visible()
    drafts = json.loads(story.evaluate("localStorage.getItem('unspool.drafts')"))
    assert next(iter(drafts.values()))["text"].endswith("fish")
    away = False
    settled(story)
    assert saved_text(story) == PROMPT + WORDS.replace(" cat", " catfish")
    assert story.evaluate("localStorage.getItem('unspool.drafts')") == "{}"


def test_what_follows_is_kept_or_written_again(story: Page) -> None:
    put_caret(story, " cat")
    story.keyboard.type(" and a dog")
    settled(story)
    edited = branch(story)["id"]
    story.locator("#rewrite-rest").click()
    until(story, f"document.querySelector('#text').dataset.branch !== {edited!r}")
    finished(story)
    assert text(story).startswith(" a cat and a dog") and "slept" not in text(story)
    story.locator("#text").press("Control+z")
    expect(story.locator("#text")).to_have_attribute("data-branch", edited)
    assert "slept" in text(story)
    story.evaluate("import('/page/code/state.js').then((m) => { m.state.afterEdit = 'keep'; })")
    put_caret(story, " cat")
    story.keyboard.type("s")
    expect(story.locator("#text .draft")).to_have_count(0)
    assert story.locator("#text .unscored").count() > 10
    story.get_by_role("button", name="Rescore").click()
    settled(story)


def test_ghosts_are_stepped_through_and_accepted(story: Page) -> None:
    put_caret(story, " mat")
    story.locator("#suggest").click()
    ghost = story.locator("#text .ghost i")
    until(story, "/3\\/3|1\\/3/.test(document.querySelector('.ghost small')?.textContent)")
    until(story, "document.querySelector('.ghost i').textContent.trim().length > 10", 60)
    expect(story.locator("#accept-word")).to_be_enabled()
    first = ghost.text_content()
    assert first
    story.keyboard.press("Escape")
    expect(story.locator("#text .ghost")).to_have_count(0)
    assert saved_text(story) == PROMPT + WORDS
    story.locator("#suggest").click()
    until(story, "document.querySelector('.ghost i')?.textContent.trim().length > 10", 60)
    length = -1
    while length != (length := len(ghost.text_content() or "")):
        story.wait_for_timeout(500)  # until it has grown to its end
    words = re.match(r"\s*\S+", ghost.text_content() or "")
    assert words
    story.keyboard.press("ArrowRight")
    story.keyboard.type("!")
    settled(story)
    assert saved_text(story) == PROMPT + WORDS.replace(" mat", f" mat{words[0]}!")


def test_continuing_at_the_caret_leaves_the_text_in_its_branch(story: Page) -> None:
    before = branch(story)
    put_caret(story, " mat")
    story.keyboard.press("Control+Enter")
    until(story, f"document.querySelector('#text').dataset.branch !== {before['id']!r}")
    finished(story)
    assert text(story).startswith(" a cat that sat at the mat")
    assert not text(story).startswith(WORDS)
    story.locator("#text").press("Control+z")
    expect(story.locator("#text")).to_have_attribute("data-branch", before["id"])
    assert text(story) == WORDS


MESSAGES = [
    {"role": "user", "content": "Birds fly high over the hill."},
    {"role": "assistant", "content": "So they do in spring."},
    {"role": "user", "content": "Name three things that swim."},
]


@pytest.fixture
def chat(page: Page) -> Page:
    created = post(page, "", messages=MESSAGES, seed=1, max_tokens=4)["id"]
    post(page, f"/{created}/append", text="Fish and ducks.")
    post(page, f"/{created}/append", message={"role": "user", "content": "Which is largest?"})
    post(page, f"/{created}/append", text="The fish.")
    adopt(page, [created], created)
    expect(tokens(page).first).to_be_visible()
    return page


@pytest.mark.parametrize("word", [" three", " they", " is", " and"])
def test_words_are_suggested_in_every_message(chat: Page, word: str) -> None:
    before = branch(chat)
    use_settings(chat, end=False)  # it writes something everywhere
    put_caret(chat, word)
    chat.locator("#suggest").click()
    until(chat, "document.querySelector('.ghost i')?.textContent.length > 3", 60)
    chat.locator("#accept-all").click()
    settled(chat)
    expect(chat.locator("#text")).not_to_have_attribute("data-branch", before["id"])
    now = branch(chat)
    contents = [message["content"] for message in now["prompt"]["messages"]]
    old = [message["content"] for message in MESSAGES]
    changed = [new != text for new, text in zip(contents, old, strict=True)]
    assert changed == [False, word == " they", word == " three"]
    assert (now["text"] != before["text"]) == (word in (" is", " and"))
    assert [turn["role"] for turn in now["turns"]] == ["user"]
    assert now["text"].endswith("The fish.")


def test_continuing_in_a_message_of_a_chat(chat: Page) -> None:
    def continue_at(word: str) -> dict[str, Any]:
        before = branch(chat)["id"]
        put_caret(chat, word)
        chat.locator("#continue-here").click()
        expect(chat.locator("#text")).not_to_have_attribute("data-branch", before)
        finished(chat)
        now = branch(chat)
        chat.locator("#text").press("Control+z")
        expect(chat.locator("#text")).to_have_attribute("data-branch", before)
        return now

    # A message of the user ends there, and the model answers.
    now = continue_at(" three")
    contents = [message["content"] for message in now["prompt"]["messages"]]
    assert contents == [MESSAGES[0]["content"], MESSAGES[1]["content"], "Name three"]
    assert now["steps"] and "Fish" not in now["text"][:4]
    now = continue_at(" is")
    assert now["prompt"]["messages"] == MESSAGES and len(now["turns"]) == 1
    first, last = now["turns"][0]["content"]
    assert "".join(step["text"] for step in now["steps"][first:last]) == "Which is"
    assert len(now["steps"]) > now["turns"][0]["end"]
    # The chat template is no message.
    put_caret(chat, "assistant")
    for button in ("#continue-here", "#suggest"):
        chat.locator(button).click()
        expect(chat.locator("#fault")).to_contain_text("The caret is in the chat template")
        chat.locator("#fault").get_by_role("button", name="Close").click()
    # An answer of the prompt is continued.
    now = continue_at(" they")
    assert now["prompt"]["messages"] == MESSAGES[:1] and now["text"].startswith("So they")


def test_undo_of_generation_is_kept_as_json(page: Page) -> None:
    write(page, "The sea", max_tokens=6, seed=5)
    page.locator("#go-on").click()
    finished(page)
    long = branch(page)
    page.locator("#text").press("Control+z")
    until(page, "document.querySelector('#text').dataset.branch !== " + repr(long["id"]))
    assert len(branch(page)["steps"]) == 6
    saved = page.evaluate(
        "import('/page/code/write/history.js').then((m) => JSON.stringify(m.saveHistory()))"
    )
    code = "import('/page/code/write/history.js').then((m) => m.loadHistory(JSON.parse(saved)))"
    page.evaluate(f"(saved) => {code}", saved)
    page.locator("#text").press("Control+Shift+z")
    expect(page.locator("#text")).to_have_attribute("data-branch", long["id"])
    assert len(branch(page)["steps"]) == len(long["steps"]) > 6
