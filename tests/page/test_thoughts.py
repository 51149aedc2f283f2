"""Thoughts on the page: folded, with what they took, opened by a click or by the keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from helpers import page_actions as acts
from helpers.running_server import running
from helpers.thought_families import QWEN_OPEN, save_thinker
from unspool.server.runtime.registry import ModelEntry

# The thought is closed for it, and the answer is the pattern's: a random model would do neither.
SETTINGS: dict[str, Any] = {"seed": 7, "think_budget": 6, "regex": "(node )+", "end": False}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import unspool

    folder = save_thinker(tmp_path_factory.mktemp("thinker"), QWEN_OPEN)
    entry = ModelEntry("thinker", lambda: unspool.load(folder, memory=8 << 20), 1 << 20)
    with running([entry]) as result:
        yield result


@pytest.fixture
def address(thinker: Any) -> str:
    return f"{thinker.url}/"


def test_a_thought_is_folded_and_opens(page: Page) -> None:
    acts.write(page, "A node?", mode="chat", max_tokens=40, **SETTINGS)
    steps = acts.branch(page)["steps"]
    thoughts = [step for step in steps if step.get("thought")]
    assert 0 < len(thoughts) < len(steps)
    head = page.get_by_role("button", name="Reasoning ·")
    took = sum(step["seconds"] for step in thoughts)
    expect(head).to_have_text(f"Reasoning · {len(thoughts)} tokens, {took:.1f} s")
    assert head.get_attribute("aria-expanded") == "false"
    inside = page.locator("#text .thought-body .t")
    assert inside.count() == len(thoughts) and not inside.first.is_visible()
    words = page.locator("#text .tokens > .line .t:not(.prompt)")
    assert words.count() == len(steps) - len(thoughts)
    head.focus()
    page.keyboard.press("Enter")
    expect(inside.first).to_be_visible()
    assert head.get_attribute("aria-expanded") == "true"
    head.click()
    expect(inside.first).not_to_be_visible()
    # The keys go into a thought, which opens; nothing that is looked at is hidden.
    page.locator("#text").focus()
    page.keyboard.press("Home")
    for _ in range(len(acts.branch(page)["prompt"]["tokens"])):
        page.keyboard.press("ArrowRight")
    expect(inside.first).to_be_visible()
    expect(inside.first).to_have_class(re.compile("selected"))
    # On a narrow screen.
    page.set_viewport_size({"width": 360, "height": 740})
    expect(head).to_be_visible()
    box = head.bounding_box()
    assert box is not None and box["height"] >= 24 and box["x"] + box["width"] <= 360
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
