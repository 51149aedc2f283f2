"""The view "Tokens": a text as pieces, their bytes and merges; other vocabularies; the context."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from playwright.sync_api import Error, Locator, Page, Route, expect

from helpers import assets
from helpers.page_actions import open_view
from unspool.server.dialects.tokens import open_vocabulary
from unspool.text.tokenizer.bpe import merge_steps

QUESTION = "How do transformers work?"
LONG_WORD = "antidisestablishmentarianism"


@pytest.fixture
def tokenizer(server: Any) -> Any:
    return server.state.registry.loaded[server.model].lm.tokenizer


@pytest.fixture
def view(page: Page) -> Page:
    """The page with the view open and its first text split."""
    open_view(page, "Tokenizer")
    expect(pieces(page).first).to_be_visible()
    return page


def area(view: Page) -> Locator:
    return view.get_by_role("textbox", name="Text", exact=True)


def pieces(view: Page) -> Locator:
    return view.get_by_role("listbox", name="Tokens of the text").get_by_role("option")


def counted(view: Page, name: str) -> Locator:
    return view.locator(f'[data-count="{name}"]')


def settled(view: Page, tokens: int) -> None:
    """Wait until the text that is there is split."""
    expect(view.locator(".tokens-found")).to_have_attribute("aria-busy", "false")
    expect(counted(view, "tokens")).to_have_text(f"{tokens:,}")


def merging(view: Page, word: str) -> Locator:
    """The player, once it shows this word."""
    player = view.get_by_role("region", name="Merges").locator("[data-word]")
    expect(player).to_have_attribute("data-word", word)
    return player


def test_a_text_is_split_walked_and_merged(view, tokenizer):
    text = "Unspooling 12 leaves,\n\tagain."
    area(view).fill("")
    expect(pieces(view)).to_have_count(0)
    area(view).press_sequentially(text)
    expected = tokenizer.encode(text)
    settled(view, len(expected))
    expect(pieces(view)).to_have_count(len(expected))
    expect(counted(view, "characters")).to_have_text(str(len(text)))
    expect(counted(view, "bytes")).to_have_text(str(len(text.encode())))
    expect(counted(view, "characters per token")).to_have_text(f"{len(text) / len(expected):.2f}")
    displayed_text = "".join(pieces(view).all_text_contents())
    assert displayed_text == text.replace(" ", "␣").replace("\n", "⏎\n").replace("\t", "⇥")

    reply = view.locator(".tk-told")
    for at, token in enumerate(expected):
        pieces(view).nth(at).hover()
        expect(reply).to_contain_text(f"id {token}")
        displayed = reply.get_by_role("group", name="Bytes").locator("b").all_text_contents()
        assert displayed == [f"{byte:02X}" for byte in tokenizer.token_bytes(token)]

    area(view).fill(QUESTION)
    expected = tokenizer.encode(QUESTION)
    settled(view, len(expected))
    view.get_by_role("listbox").focus()
    reply = view.locator(".tk-told")
    expect(reply).to_contain_text(f"id {expected[0]}")
    for token in expected[1:]:
        view.keyboard.press("ArrowRight")
        expect(reply).to_contain_text(f"id {token}")
    view.keyboard.press("Home")
    expect(pieces(view).first).to_have_attribute("aria-selected", "true")
    view.keyboard.press("ArrowRight")
    view.keyboard.press("Enter")
    merging(view, "␣do")

    area(view).fill("🍁")
    ids = tokenizer.encode("🍁")
    settled(view, len(ids))
    parts = [tokenizer.token_bytes(token) for token in ids]
    assert len(parts) > 1 and b"".join(parts) == "🍁".encode()
    reply = view.locator(".tk-told")
    for at, part in enumerate(parts):
        pieces(view).nth(at).click()
        expect(reply).to_contain_text("Only part of a character")
        expect(reply).to_contain_text("of the 4 bytes of 🍁")
        mine = reply.locator("b:not(.elsewhere):not(.mono)").all_text_contents()
        assert mine == [f"{byte:02X}" for byte in part]
        others = reply.locator("b.elsewhere").all_text_contents()
        assert len(mine) + len(others) == 4
    assert pieces(view).first.inner_text().startswith("🍁")  # where it begins, it is written

    view.get_by_role("button", name="Rare word").click()
    (word,) = merge_steps(tokenizer, LONG_WORD)
    settled(view, len(word.ids))
    player = merging(view, LONG_WORD)
    expect(player).to_have_attribute("data-step", str(len(word.merges)))
    boxes = player.locator(".merge-box")
    expect(boxes).to_have_count(len(word.start) + len(word.merges))
    assert player.locator(".merge-id").all_text_contents() == [str(token) for token in word.ids]

    view.get_by_role("button", name="First").click()
    expect(boxes).to_have_count(len(word.start))
    expect(view.get_by_role("button", name="Back")).to_be_disabled()
    said = player.locator(".merge-said")
    for merge in word.merges:
        view.get_by_role("button", name="Forward").click()
        expect(said).to_contain_text(f"merge rank {merge.rank:,}")
        expect(player.locator(".merge-box.new .mono")).to_have_text(
            merge.pieces[merge.position].decode()
        )
    expect(said).to_contain_text(f"Done: {len(word.ids)} tokens")

    view.get_by_role("button", name="Rare word").click()
    player = merging(view, LONG_WORD)
    picture = view.get_by_role("group", name=f"The merges of {LONG_WORD}")
    picture.focus()
    view.keyboard.press("Home")
    expect(player).to_have_attribute("data-step", "0")
    view.keyboard.press(" ")
    expect(view.get_by_role("button", name="Pause")).to_be_visible()
    expect(player).to_have_attribute("data-step", "2")
    view.keyboard.press(" ")
    expect(view.get_by_role("button", name="Play", exact=True)).to_be_visible()
    view.keyboard.press("ArrowLeft")
    view.keyboard.press("ArrowLeft")
    view.keyboard.press("ArrowLeft")
    expect(player).to_have_attribute("data-step", "0")
    view.keyboard.press("End")
    expect(view.get_by_role("button", name="Forward")).to_be_disabled()
    view.get_by_role("slider", name="Merge").fill("3")
    expect(player).to_have_attribute("data-step", "3")

    area(view).fill(QUESTION)
    pieces(view).filter(has_text="transform").click()
    player = merging(view, "␣transformers")
    expect(view.get_by_role("button", name="Pause")).to_be_visible()
    expect(player).not_to_have_attribute("data-step", "0")

    view.emulate_media(reduced_motion="reduce")
    pieces(view).filter(has_text="work").click()
    player = merging(view, "␣work")
    expect(view.get_by_role("button", name="Play", exact=True)).to_be_visible()
    last = view.get_by_role("slider", name="Merge").get_attribute("max")
    expect(player).to_have_attribute("data-step", str(last))
    view.get_by_role("button", name="Back").click()
    expect(player).to_have_attribute("data-step", str(int(last or 0) - 1))


def test_a_vocabulary_without_merges_says_so(view, expected_errors):
    expected_errors.append("400")
    message = "this vocabulary is unigram and has no merges; only byte-pair encoding does"

    def refuse(route: Route) -> None:
        if '"merges":true' in (route.request.post_data or ""):
            route.fulfill(status=400, json={"error": {"message": message}})
        else:
            route.continue_()

    view.route("**/tokenize", refuse)
    area(view).fill("elsewhere")
    merges = view.get_by_role("region", name="Merges")
    expect(merges).to_contain_text("There are no merges to show. This vocabulary is unigram")


@pytest.fixture
def rank_files(monkeypatch, tmp_path):
    """Of OpenAI's rank files, only one is where the server looks for them."""
    (tmp_path / "gpt2.tiktoken").symlink_to(assets.tiktoken_ranks() / "gpt2.tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    open_vocabulary.cache_clear()
    yield
    open_vocabulary.cache_clear()


def test_other_vocabularies_count_and_cut_or_say_what_to_do(rank_files, view, tokenizer):
    area(view).fill(QUESTION)
    others = view.get_by_role("region", name="Other vocabularies")
    row = others.locator('[data-vocabulary="gpt2"]')
    expect(row.locator(".vocabulary-count b")).to_have_text("6")
    expect(row.locator(".tk")).to_have_text(["How", "␣do", "␣transform", "ers", "␣work", "?"])
    mine = others.get_by_role("listitem").first
    expect(mine.locator(".vocabulary-count b")).to_have_text(str(len(tokenizer.encode(QUESTION))))
    view.get_by_text("others not on this machine").click()
    row = view.locator('[data-vocabulary="cl100k"]')
    expect(row).to_contain_text("not on this machine. Put cl100k_base.tiktoken into a folder")
    expect(row).to_contain_text("TIKTOKEN_CACHE_DIR")
    expect(view.get_by_role("button", name="Check again")).to_be_enabled()


def test_the_context_fills_warms_and_overflows(view, server):
    total = server.state.registry.loaded[server.model].lm.context
    bar = view.get_by_role("meter", name="Context window")
    state = view.locator(".context-bar")
    for tokens, kind, said in (
        (total // 2, "calm", f"{total - total // 2:,} free"),
        (total - 100, "near", "100 free"),
        (total + 12, "over", "12 tokens over the limit"),
    ):
        area(view).fill("a" + " a" * (tokens - 1))
        settled(view, tokens)
        expect(state).to_have_attribute("data-state", kind)
        expect(state).to_contain_text(said)
        expect(bar).to_have_attribute("aria-valuenow", str(min(tokens, total)))


@pytest.mark.slow
def test_a_long_text_is_drawn_in_part_until_asked(view, tokenizer):
    text = "The quick brown fox jumps over the lazy dog. " * 440
    expected = tokenizer.encode(text)
    area(view).fill(text)
    settled(view, len(expected))
    expect(pieces(view)).to_have_count(960)
    view.get_by_role("button", name="Show all").click()
    expect(pieces(view)).to_have_count(len(expected))
    area(view).fill("short")
    settled(view, len(tokenizer.encode("short")))
    expect(view.get_by_role("button", name="Show all")).to_have_count(0)


def test_the_examples(view, tokenizer):
    for name in ("Code", "Numbers", "Other languages", "Emoji", "Sentence"):
        before = area(view).input_value()
        view.get_by_role("button", name=name).click()
        expect(area(view)).not_to_have_value(before)
        expected = tokenizer.encode(area(view).input_value())
        settled(view, len(expected))
        expect(pieces(view)).to_have_count(len(expected))

    area(view).fill("Once upon a time")
    view.get_by_role("button", name="Use as prompt").click()
    expect(view.locator("#prompt")).to_have_value("Once upon a time")
    open_view(view, "Tokenizer")
    expect(area(view)).to_have_value("Once upon a time")  # and is still here

    typed = "half \ud83c" + "\x00\x07 zero\u200bwidth \u202eback e\u0301 مرحبا <|im_end|>"
    area(view).evaluate(
        """(field, units) => {
            field.value = String.fromCharCode(...units);
            field.dispatchEvent(new Event("input", { bubbles: true }));
        }""",
        [ord(unit) for unit in typed],
    )
    sent_text = typed.replace("\ud83c", "\ufffd")
    settled(view, len(tokenizer.encode(sent_text, specials=False)))
    displayed_text = "".join(pieces(view).all_text_contents())
    for mark in ("\ufffd", "U+0000", "U+0007", "U+200B", "U+202E"):
        assert mark in displayed_text
    assert "\u200b" not in displayed_text and "\u202e" not in displayed_text

    area(view).fill("xyz" * 2000)
    settled(view, len(tokenizer.encode("xyz" * 2000)))
    merges = view.get_by_role("region", name="Merges")
    expect(merges).to_contain_text("only a part is shown")
    expect(merges.locator(".merge-box.smallest")).to_have_count(64)


def test_a_fault_is_said_in_place_and_passes(view, tokenizer, expected_errors):
    expected_errors.append("500")
    view.route("**/tokenize", lambda route: route.fulfill(status=500, json={}))
    area(view).fill("something new")
    fault = view.locator(".tokens-found").get_by_role("alert")
    expect(fault).to_contain_text("status 500")
    view.unroute("**/tokenize")
    fault.get_by_role("button", name="Try again").click()
    expect(fault).to_have_count(0)
    settled(view, len(tokenizer.encode("something new")))

    pending: list[Route] = []

    def hold(route: Route) -> None:
        if '"slow' in (route.request.post_data or ""):
            pending.append(route)
        else:
            route.continue_()

    view.route("**/tokenize", hold)
    with view.expect_request(lambda request: '"slow' in (request.post_data or "")):
        area(view).fill("slow answers come too late")
    area(view).fill("quick")
    settled(view, len(tokenizer.encode("quick")))  # while the first answer is held back
    assert pending
    for route in pending:
        with suppress(Error):  # the page has cancelled it
            route.fulfill(json={"error": {"message": "a late answer"}}, status=500)
    view.wait_for_timeout(100)
    expect(view.locator(".tokens-found").get_by_role("alert")).to_have_count(0)
    expect(pieces(view)).to_have_text([tokenizer.token_text(t) for t in tokenizer.encode("quick")])
