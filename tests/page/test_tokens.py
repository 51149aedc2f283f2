"""The view "Tokens": a text as pieces, their bytes and merges; other vocabularies; the context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from unspool.text.tokenizer.bpe import merge_steps

QUESTION = "How do transformers work?"
LONG_WORD = "antidisestablishmentarianism"


@pytest.fixture
def tokenizer(server: Any) -> Any:
    return server.state.registry.loaded[server.model].lm.tokenizer


@pytest.fixture
def view(page: Page) -> Page:
    """The page with the view open and its first text split."""
    page.get_by_role("button", name="Tokens", exact=True).click()
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


def test_a_text_is_split_as_it_is_typed(view, tokenizer):
    text = "Unspooling 12 leaves,\n\tagain."
    area(view).fill("")
    expect(pieces(view)).to_have_count(0)
    area(view).press_sequentially(text)
    wanted = tokenizer.encode(text)
    settled(view, len(wanted))
    expect(pieces(view)).to_have_count(len(wanted))
    expect(counted(view, "characters")).to_have_text(str(len(text)))
    expect(counted(view, "bytes")).to_have_text(str(len(text.encode())))
    expect(counted(view, "characters per token")).to_have_text(f"{len(text) / len(wanted):.2f}")
    drawn = "".join(pieces(view).all_text_contents())
    assert drawn == text.replace(" ", "␣").replace("\n", "⏎\n").replace("\t", "⇥")

    told = view.locator(".tk-told")
    for at, token in enumerate(wanted):
        pieces(view).nth(at).hover()
        expect(told).to_contain_text(f"id {token}")
        shown = told.get_by_role("group", name="Bytes").locator("b").all_text_contents()
        assert shown == [f"{byte:02X}" for byte in tokenizer.token_bytes(token)]


def test_the_pieces_are_walked_with_keys(view, tokenizer):
    area(view).fill(QUESTION)
    wanted = tokenizer.encode(QUESTION)
    settled(view, len(wanted))
    view.get_by_role("listbox").focus()
    told = view.locator(".tk-told")
    expect(told).to_contain_text(f"id {wanted[0]}")
    for token in wanted[1:]:
        view.keyboard.press("ArrowRight")
        expect(told).to_contain_text(f"id {token}")
    view.keyboard.press("Home")
    expect(pieces(view).first).to_have_attribute("aria-selected", "true")
    view.keyboard.press("ArrowRight")
    view.keyboard.press("Enter")
    merging(view, "␣do")


def test_part_of_a_character_is_shown_as_such(view, tokenizer):
    area(view).fill("🍁")
    ids = tokenizer.encode("🍁")
    settled(view, len(ids))
    parts = [tokenizer.token_bytes(token) for token in ids]
    assert len(parts) > 1 and b"".join(parts) == "🍁".encode()
    told = view.locator(".tk-told")
    for at, part in enumerate(parts):
        pieces(view).nth(at).click()
        expect(told).to_contain_text("Only part of a character")
        expect(told).to_contain_text("of the 4 bytes of 🍁")
        own = told.locator("b:not(.elsewhere):not(.mono)").all_text_contents()
        assert own == [f"{byte:02X}" for byte in part]
        others = told.locator("b.elsewhere").all_text_contents()
        assert len(own) + len(others) == 4
    assert pieces(view).first.inner_text().startswith("🍁")  # where it begins, it is written


def test_the_merges_are_played_one_by_one(view, tokenizer):
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
        expect(said).to_contain_text(f"merge {merge.rank:,} of the training")
        expect(player.locator(".merge-box.new .mono")).to_have_text(
            merge.pieces[merge.position].decode()
        )
    expect(said).to_contain_text(f"Nothing is left to join: {len(word.ids)} tokens")


def test_the_merges_play_by_themselves_and_by_keys(view):
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


def test_a_picked_word_is_played_and_stands_still_for_who_wants_no_motion(view):
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
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """OpenAI's rank files, where the server looks for them."""
    from helpers import assets
    from unspool.server.dialects.tokens import NAMES, open_vocabulary

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(assets.tiktoken_ranks()))
    open_vocabulary.cache_clear()
    for name in NAMES:
        open_vocabulary(name)  # takes a while, which the browser need not wait for
    yield
    open_vocabulary.cache_clear()


def test_other_vocabularies_count_and_cut(ranks, view, tokenizer):
    area(view).fill(QUESTION)
    others = view.get_by_role("region", name="Other vocabularies")
    for name, tokens in {"gpt2": 6, "cl100k": 5, "o200k": 5}.items():
        row = others.locator(f'[data-vocabulary="{name}"]')
        expect(row.locator(".vocabulary-count b")).to_have_text(str(tokens))
        expect(row.locator(".tk")).to_have_count(tokens)
    assert row.locator(".tk").all_text_contents() == ["How", "␣do", "␣transformers", "␣work", "?"]
    own = others.get_by_role("listitem").first
    expect(own.locator(".vocabulary-count b")).to_have_text(str(len(tokenizer.encode(QUESTION))))


def test_a_vocabulary_that_is_not_here_says_what_to_do(monkeypatch, page):
    from unspool.server.dialects.tokens import open_vocabulary

    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    open_vocabulary.cache_clear()
    page.get_by_role("button", name="Tokens", exact=True).click()
    page.get_by_text("others not on this machine").click()
    row = page.locator('[data-vocabulary="cl100k"]')
    expect(row).to_contain_text("not on this machine. Put cl100k_base.tiktoken into a folder")
    expect(row).to_contain_text("TIKTOKEN_CACHE_DIR")
    expect(page.get_by_role("button", name="Look again")).to_be_enabled()


def test_the_context_fills_warms_and_overflows(view, server):
    total = server.state.registry.loaded[server.model].lm.context
    bar = view.get_by_role("meter", name="Context window")
    state = view.locator(".context-bar")
    for tokens, kind, said in (
        (total // 2, "calm", f"{total - total // 2:,} free"),
        (total - 100, "near", "100 free"),
        (total + 12, "over", "12 tokens too many"),
    ):
        area(view).fill("a" + " a" * (tokens - 1))
        settled(view, tokens)
        expect(state).to_have_attribute("data-state", kind)
        expect(state).to_contain_text(said)
        expect(bar).to_have_attribute("aria-valuenow", str(min(tokens, total)))


@pytest.mark.slow
def test_a_long_text_is_drawn_in_part_until_asked(view, tokenizer):
    text = "The quick brown fox jumps over the lazy dog. " * 440
    wanted = tokenizer.encode(text)
    area(view).fill(text)
    settled(view, len(wanted))
    expect(pieces(view)).to_have_count(960)
    view.get_by_role("button", name="Show all").click()
    expect(pieces(view)).to_have_count(len(wanted))
    area(view).fill("short")
    settled(view, len(tokenizer.encode("short")))
    expect(view.get_by_role("button", name="Show all")).to_have_count(0)


def test_the_examples(view, tokenizer):
    for name in ("Code", "Numbers", "Other languages", "Emoji", "Sentence"):
        before = area(view).input_value()
        view.get_by_role("button", name=name).click()
        expect(area(view)).not_to_have_value(before)
        wanted = tokenizer.encode(area(view).input_value())
        settled(view, len(wanted))
        expect(pieces(view)).to_have_count(len(wanted))


def test_the_text_becomes_the_prompt(view):
    area(view).fill("Once upon a time")
    view.get_by_role("button", name="Use as prompt").click()
    expect(view.locator("#prompt")).to_have_value("Once upon a time")
    view.get_by_role("button", name="Tokens", exact=True).click()
    expect(area(view)).to_have_value("Once upon a time")  # and is still here


def test_what_cannot_be_seen_is_shown(view, tokenizer):
    typed = "half \ud83c" + "\x00\x07 zero\u200bwidth \u202eback e\u0301 مرحبا <|im_end|>"
    area(view).evaluate(
        """(field, units) => {
            field.value = String.fromCharCode(...units);
            field.dispatchEvent(new Event("input", { bubbles: true }));
        }""",
        [ord(unit) for unit in typed],
    )
    sent = typed.replace("\ud83c", "\ufffd")
    settled(view, len(tokenizer.encode(sent, specials=False)))
    drawn = "".join(pieces(view).all_text_contents())
    for mark in ("\ufffd", "U+0000", "U+0007", "U+200B", "U+202E"):
        assert mark in drawn
    assert "\u200b" not in drawn and "\u202e" not in drawn


def test_a_very_long_word_is_merged_in_part(view, tokenizer):
    area(view).fill("xyz" * 2000)
    settled(view, len(tokenizer.encode("xyz" * 2000)))
    merges = view.get_by_role("region", name="Merges")
    expect(merges).to_contain_text("a part of it is shown")
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


def test_an_answer_that_was_overtaken_is_not_shown(view, tokenizer):
    held: list[Route] = []

    def hold(route: Route) -> None:
        if '"slow' in (route.request.post_data or ""):
            held.append(route)
        else:
            route.continue_()

    view.route("**/tokenize", hold)
    with view.expect_request("**/tokenize"):
        area(view).fill("slow answers come too late")
    with view.expect_event("requestfailed"):  # it is given up, not waited for
        area(view).fill("quick")
    settled(view, len(tokenizer.encode("quick")))
    assert held
    expect(pieces(view)).to_have_text([tokenizer.token_text(t) for t in tokenizer.encode("quick")])
