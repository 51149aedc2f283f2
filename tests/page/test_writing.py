"""Writing: a prompt, Enter, and the text comes token by token; pause, step, stop, speed, tints."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from helpers.page_actions import (
    address_of,
    branch,
    finished,
    next_frames,
    open_panel,
    set_settings,
    start_writing,
    text,
    tokens,
    until,
    write,
)

QUESTION = "Why do leaves change color in fall?"


def test_a_prompt_and_enter_write_a_text(page: Page) -> None:
    write(page, QUESTION, mode="chat", max_tokens=12, seed=7, end=False)
    reply = branch(page)
    assert tokens(page).count() == 12
    assert text(page) == reply["text"]
    assert reply["seed"] == 7
    ending = page.locator("#ending")
    expect(ending).to_have_text("Stopped: max tokens reached.")
    page.get_by_role("button", name="Continue", exact=True).click()
    expect(tokens(page)).to_have_count(24)
    finished(page)
    expect(ending).to_have_text("Stopped: max tokens reached.")
    expect(page.locator("[data-live=tokens]")).to_have_text("24 tokens")

    reply = reply["prompt"]["tokens"]
    added = page.locator("#text .t.prompt.added")
    assert added.count() == sum(token["added"] for token in reply) > 0
    assert added.first.text_content() == "<|im_start|>"
    mine = page.locator("#text .t.prompt:not(.added)")
    assert "".join(mine.all_text_contents()) == QUESTION
    write(page, QUESTION, mode="plain", max_tokens=2)
    assert page.locator("#text .t.added").count() == 0
    assert "".join(mine.all_text_contents()) == QUESTION

    page.locator("#new").click()
    page.get_by_role("group", name="Mode").get_by_role("button", name="Chat").click()
    page.get_by_role("button", name="System").click()
    page.get_by_label("System message").fill("Answer in French.")
    write(page, QUESTION, mode="chat", max_tokens=2)
    prompt = branch(page)["prompt"]
    assert prompt["messages"][0] == {"role": "system", "content": "Answer in French."}
    assert "SmolLM" not in prompt["text"]

    fields, usual = page.evaluate(
        """() => Promise.all(
            [import('/page/code/settings.js'), import('/page/code/share/session.js')]
        ).then(([ours, shared]) => [ours.FIELDS, shared.DEFAULTS])"""
    )
    request = page.request.post(f"{address_of(page)}/v1/tree", data={"prompt": "Hi"})
    served = request.json()["settings"]
    for name, value in usual.items():
        assert served[name] == value, name
    for field in fields:
        if field["name"] not in ("seed", "max_tokens", "stop"):
            assert served[field["name"]] == field["defaultValue"], field["name"]


def test_pause_step_resume_stop(page: Page) -> None:
    set_settings(page, max_tokens=1000, seed=3, end=False)
    page.get_by_role("button", name="Plain").click()
    page.locator("#speed").fill("4")  # 8 tokens a second
    start_writing(page, "Once upon a time")
    expect(tokens(page).nth(1)).to_be_visible()
    page.get_by_role("button", name="Pause").click()
    finished(page)
    paused = tokens(page).count()
    page.get_by_role("button", name="Step").click()
    expect(tokens(page)).to_have_count(paused + 1)
    finished(page)
    page.locator("#go-on").click()
    expect(tokens(page).nth(paused + 2)).to_be_visible()
    page.locator("#speed").fill("6")  # 30 tokens a second, while it writes
    expect(tokens(page).nth(paused + 20)).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    finished(page)
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    expect(page.locator("#go-on")).to_be_visible()
    page.locator("#speed").fill("9")  # full speed
    complete, count = text(page), tokens(page).count()
    assert count < 1000
    write(page, "Once upon a time", max_tokens=count, seed=3, end=False)
    assert text(page) == complete  # pausing and the pace changed nothing


def test_tints_follow_what_is_chosen(page: Page) -> None:
    write(page, "Once upon a time", max_tokens=24, seed=5)
    steps = branch(page)["steps"]
    tint = re.compile(r"tint-(\d)")

    def tints() -> list[int]:
        names = tokens(page).evaluate_all("(all) => all.map((t) => t.className)")
        return [int(result[1]) if (result := tint.search(name)) else 0 for name in names]

    for by, value in (
        ("probability", lambda step: -step["logprob"]),
        ("entropy", lambda step: step["entropy"]),
        ("rank", lambda step: step["rank"]),
    ):
        page.get_by_label("Color by").select_option(by)
        next_frames(page)
        displayed = tints()
        assert len(set(displayed)) > 1
        pairs = sorted(zip(map(value, steps), displayed, strict=True))
        assert [item for _, item in pairs] == sorted(displayed)  # the stronger, the more
    page.get_by_label("Color by").select_option("none")
    next_frames(page)
    assert set(tints()) == {0}

    page.locator("#text").focus()
    page.keyboard.press("ArrowRight")
    first = tokens(page).first
    expect(first).to_have_class(re.compile("selected"))
    page.keyboard.press("ArrowRight")
    expect(tokens(page).nth(1)).to_have_class(re.compile("selected"))
    expect(page.locator("#text [role=status]")).to_contain_text("probability")
    page.keyboard.press("ArrowLeft")
    expect(first).to_have_class(re.compile("selected"))
    page.keyboard.press("End")
    expect(tokens(page).last).to_have_class(re.compile("selected"))
    page.keyboard.press("ArrowUp")
    expect(tokens(page).last).not_to_have_class(re.compile("selected"))
    page.keyboard.press("Escape")
    expect(page.locator("#text .t.selected")).to_have_count(0)
    page.keyboard.press("5")
    expect(page.get_by_role("heading", name="Settings")).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()


def test_a_reply_goes_on_with_the_conversation(page: Page) -> None:
    write(page, "Name a color.", mode="chat", max_tokens=40, temperature=0)
    before = branch(page)
    page.get_by_label("Reply").fill("Name another one.")
    page.get_by_label("Reply").press("Enter")
    expect(page.locator("#text .t.chosen:not(.added)").first).to_be_visible()
    finished(page)
    after = branch(page)
    assert after["id"] == before["id"] and after["text"].startswith(before["text"])
    assert "<|im_start|>user\nName another one.<|im_end|>" in "".join(
        step["piece"] for step in after["steps"]
    )
    mine = [step["piece"] for step in after["steps"] if step["chosen"]]
    displayed = page.locator("#text .t.chosen:not(.added)").all_text_contents()
    assert "".join(displayed) == "Name another one." and "".join(mine) != "Name another one."
    page.locator("#text").focus()
    page.keyboard.press("Control+z")
    expect(tokens(page)).to_have_count(before["length"])


def test_own_words_in_a_plain_text(page: Page) -> None:
    write(page, "The capital of Germany", max_tokens=3, temperature=0)
    page.get_by_label("Your text").fill(" and of Prussia was")
    page.get_by_role("button", name="Add").click()
    expect(page.locator("#text .t.chosen").last).to_be_visible()
    finished(page)
    assert " and of Prussia was" in text(page)
    assert branch(page)["length"] > 7

    write(page, QUESTION, mode="chat", max_tokens=12, seed=7)
    open_panel(page, "Branches")
    complete = text(page)
    until(page, "sessionStorage.getItem('unspool.session')?.includes('branches')")
    page.reload()
    expect(tokens(page)).to_have_count(12)
    assert text(page) == complete
    expect(page.get_by_role("tab", name="Branches")).to_have_attribute("aria-selected", "true")

    write(page, "🦜🦜🦜🦜🦜🦜", max_tokens=4, temperature=0)
    mine = page.locator("#text .t.prompt")
    assert mine.count() == len(branch(page)["prompt"]["tokens"])
    for number in range(mine.count()):
        assert mine.nth(number).bounding_box()["width"] > 1
    displayed = page.locator("#text").inner_text()
    assert "�" not in displayed or "🦜" in displayed
